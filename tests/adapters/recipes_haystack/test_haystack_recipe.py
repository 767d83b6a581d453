"""The recipe for Haystack on docs/recipes.md works as it is printed."""

from __future__ import annotations

from tests.adapters import recipe


def test_the_recipe_works() -> None:
    recipe.check(recipe.run("Haystack"))
