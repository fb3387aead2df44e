"""What steps of the algorithms cost, in the unit of the linear maps: floating-point operations of large products."""

from __future__ import annotations

import math

from convexformer_solvers.program import Program

from .config import AutoConfig


def products_of_gram(program: Program) -> float:
    """Products with the data in the time of which the Gram matrix of all features is formed."""
    return program.map.gram_work() / program.map.product_work(program.y.shape[1])


def admm_work(program: Program, config: AutoConfig) -> float:
    """Work of one step of alternating directions, with its small calls."""
    n_outputs, rates = program.y.shape[1], program.map.rates
    solves = program.map.smaller_side**2 * max(2.0 * n_outputs, rates.work_of_a_read)
    return 2 * program.map.product_work(n_outputs) + solves + config.calls * rates.work_of_a_call


def factor_work(program: Program) -> float:
    """Work of a Cholesky factor of the Gram matrix on the smaller side."""
    return program.map.smaller_side**3 / 3


def gradient_steps_of_admm(program: Program, config: AutoConfig, n_calls: int = 0) -> float:
    """Gradient steps, of two products each, in the time that alternating directions take, with Gram matrix and factor.

    These take more iterations where the loss couples the outputs. Each step of either makes `n_calls` small calls.
    """
    side, rates = program.map.smaller_side, program.map.rates
    iterations = config.usual_steps if program.loss.output_separable else config.first_steps
    start = program.map.gram_work() + factor_work(program)
    step = 2 * program.map.product_work(program.y.shape[1]) + n_calls * rates.work_of_a_call
    return (start + iterations * (step + rates.work_of_a_read * side**2)) / step


def gradient_steps_of_gram(program: Program) -> float:
    """Gradient steps, of two products each, in the time of a Gram matrix for each output, and its factor."""
    n_outputs = program.y.shape[1]
    return n_outputs * (program.map.gram_work() + factor_work(program)) / (2 * program.map.product_work(n_outputs))


def block_steps_of_admm(program: Program, config: AutoConfig) -> float:
    """Steps of block descent on one block in the time that alternating directions take, with Gram matrix and factor."""
    start = program.map.gram_work() + factor_work(program)
    whole = start + config.usual_steps * admm_work(program, config)
    return whole / (config.block_calls * program.map.rates.work_of_a_call)


def block_numbers(program: Program) -> int:
    """Numbers that the penalty's second derivatives hold, of outputs that are solved together."""
    outputs = program.y.shape[1] // program.n_parts
    return math.prod(program.map.feature_shape) * outputs * program.map.feature_shape[-1] * outputs
