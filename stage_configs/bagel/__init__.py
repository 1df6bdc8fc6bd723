"""Stage configs that come with BAGEL."""
