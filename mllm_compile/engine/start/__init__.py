"""An engine is made of parts; here they are made: slow imports, the device, a warm start."""
