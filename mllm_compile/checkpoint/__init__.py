"""Which bytes of a checkpoint fill which weight."""
