"""How well a model predicts a text: perplexity and KL divergence, in the terms and files of llama-perplexity."""
