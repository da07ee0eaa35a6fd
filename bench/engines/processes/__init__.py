"""One file an engine: started in an environment of its own, it decodes what it is told."""
