"""Which kernel a product has: cost models, and measurements on the device."""
