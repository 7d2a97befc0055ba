"""A model as a folder of static files that a browser runs: the plans, the weights in GPU layout, the tokenizer."""
