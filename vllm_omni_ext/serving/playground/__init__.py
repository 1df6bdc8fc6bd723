"""`/playground`: a page to try the served model in a browser."""
