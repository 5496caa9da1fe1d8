"""The KV cache: block allocation, prefix caching, eviction and offloading."""
