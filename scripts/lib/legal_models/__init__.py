"""Random legal Keras models and uses of them, each compared with an independent answer."""
