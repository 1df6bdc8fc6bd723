"""Watch processes and restart them."""
