"""One file per architecture, named like GGUF's `general.architecture`: metadata → config → graph."""
