"""Bodies of requests and responses as msgspec structs, one module for each family of APIs. OpenAPI is made of them.

Requests: a field that may be left out may be null, too. Unknown fields are ignored.
"""
