"""The protocol between layers and networks, and the modules that all layers share."""
