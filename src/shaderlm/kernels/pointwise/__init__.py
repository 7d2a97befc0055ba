"""Element-wise ops, rope, embedding look-up and argmax."""
