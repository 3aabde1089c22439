"""Thin adapters to other packages; importing gbmoe imports none of them."""
