"""The paths of a server whose model embeds, classifies or scores texts."""
