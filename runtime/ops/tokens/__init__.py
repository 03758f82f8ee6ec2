"""Choice and draw of tokens, and the kernels around a captured decode that hand them on."""
