"""Models that pool: encoders, embedders and classifiers, as Transformers has them."""
