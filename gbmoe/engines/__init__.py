"""The engines, and the choice of one (choice.py).

`engine="auto"` takes the first engine in the order of gbmoe/tuning/engine_order.py that is available and does not refuse the operands, or
`reference` where there is none. A name forces that engine, and raises where it cannot compute the product.
"""

from gbmoe.engines.choice import (
    BATCH_INVARIANT,
    ENGINES,
    FLOAT8_ENGINES,
    availability,
    batch_invariant,
    float8,
    for_experts,
    forget,
    linear,
    names,
    of_operands,
    product,
    recipe_of,
    recipes_availability,
    refusals,
    resolve,
    select,
    taken_by_auto,
)

__all__ = [
    "BATCH_INVARIANT", "ENGINES", "FLOAT8_ENGINES", "availability", "batch_invariant", "float8", "for_experts", "forget", "linear", "names",
    "of_operands", "product", "recipe_of", "recipes_availability", "refusals", "resolve", "select", "taken_by_auto",
]
