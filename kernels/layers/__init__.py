"""Parts of a transformer layer: products with packed weights, RMS norm, SwiGLU."""
