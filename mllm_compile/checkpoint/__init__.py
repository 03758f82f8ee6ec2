"""Plans which bytes of a checkpoint fill which weight."""
