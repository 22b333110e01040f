"""The forms that a part of a layer may have, as far as they are facts without arrays. No JAX.

A form is one object: its parameters, the sizes and the partition of their axes, its floating-point
operations, its rules, and the place of the module that computes it.
"""
