"""Bytes and named arrays: block formats of weights. Knows neither GPU nor text."""
