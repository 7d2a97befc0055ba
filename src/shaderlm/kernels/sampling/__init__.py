"""From logits to tokens: argmax, and sampling with its own settings for every row."""
