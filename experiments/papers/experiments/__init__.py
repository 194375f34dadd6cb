"""All experiments, grouped by paper. Experiments that reuse runs of others come after them."""

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import (
    label_noise,
    quadratic_cifar,
    quadratic_lemmas,
    single_logit_cifar,
    single_logit_mnist,
    slc_speedup,
    spherical_cost,
    spherical_tables,
    temperature,
    topk_algorithms,
    topk_sizes,
    tree_cifar,
    tree_hierarchies,
    tree_norms,
    tree_synthetic,
    tree_twitter,
)

EXPERIMENTS: tuple[Experiment, ...] = (
    tree_synthetic.EXPERIMENT,
    tree_norms.EXPERIMENT,
    tree_hierarchies.EXPERIMENT,
    tree_cifar.EXPERIMENT,
    tree_twitter.EXPERIMENT,
    quadratic_lemmas.EXPERIMENT,
    quadratic_cifar.EXPERIMENT,
    single_logit_mnist.EXPERIMENT,
    single_logit_cifar.EXPERIMENT,
    slc_speedup.EXPERIMENT,
    label_noise.EXPERIMENT,
    topk_sizes.EXPERIMENT,
    topk_algorithms.EXPERIMENT,
    temperature.EXPERIMENT,
    spherical_tables.EXPERIMENT,
    spherical_cost.EXPERIMENT,
)
