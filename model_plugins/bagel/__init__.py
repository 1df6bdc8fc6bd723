"""BAGEL: text and images from one sequence. Only the model's own computation so far; nothing here serves requests."""
