"""A user's config, a model's folder and a device become the resolved config: no `auto` is left."""
