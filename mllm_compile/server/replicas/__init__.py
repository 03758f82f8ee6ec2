"""A server of several engines of one model: the choice of a request's engine, and the devices of each."""
