"""Analytic memory and step-time model, and the search for a strategy within a budget.

Nothing here but `planner.measure` imports JAX.
"""
