"""The recipe for agno in docs/recipes.md works as printed."""

from __future__ import annotations

from tests.adapters import recipe


def test_the_recipe_works() -> None:
    recipe.check(recipe.run("agno"))
