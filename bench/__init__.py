"""Measurements. They import the product; nothing in the product imports them."""
