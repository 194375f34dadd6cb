"""All experiments, grouped by paper."""

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import (
    mnist,
    published_networks,
    quadratic_lemmas,
    spherical_cost,
    topk_algorithms,
    tree_hierarchies,
    tree_norms,
    tree_synthetic,
)

EXPERIMENTS: tuple[Experiment, ...] = tuple(
    sorted(
        (
            tree_synthetic.EXPERIMENT,
            tree_norms.EXPERIMENT,
            tree_hierarchies.EXPERIMENT,
            quadratic_lemmas.EXPERIMENT,
            mnist.SINGLE_LOGITS,
            topk_algorithms.EXPERIMENT,
            mnist.SPHERICAL,
            spherical_cost.EXPERIMENT,
            *published_networks.EXPERIMENTS,
        ),
        key=lambda one: (one.paper, one.gpu),
    )
)
