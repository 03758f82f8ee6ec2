"""The sources of encoder-decoders, and images that layers attend to: both have pages of their own."""
