"""Element-wise ops, rope and embedding look-up."""
