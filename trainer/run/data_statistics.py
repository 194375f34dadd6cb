"""Initial weights that are statistics of the training data: `head.init: means`, and the document
frequencies of a bag of words. Each is one pass over the first epoch."""

from collections.abc import Iterator

import torch

from data.loading.batch import Batch, Cursor
from data.loading.order import share
from data.messages import silent
from data.progress import plain_lines
from heads.collectives import all_reduce_sum
from heads.label_sets import LabelSets, class_ids_of
from trainer.backbone.bag_of_words import BagOfWords
from trainer.evaluation.class_scores import all_rows
from trainer.run.training_data import RunData
from trainer.task import Task, labels_of
from trainer.world import World


def start_from_data(task: Task, data: RunData, world: World) -> None:
    """Set the weights of a new task that its recipe derives from the training data, if any
    (collective).

    Call it before `Task.start_training`, which distributes the weights.
    """
    encoder = task.backbone.encoder
    if isinstance(encoder, BagOfWords) and encoder.idf:
        _count_documents(encoder, task, data, world)
    if task.recipe.head.init == "means":
        task.num_initial_rows = _set_rows_to_means(task, data, world)


def _count_documents(encoder: BagOfWords, task: Task, data: RunData, world: World) -> None:
    counts = torch.zeros(len(encoder.weights.weight), dtype=torch.int64, device=world.device)
    for batch in _first_epoch(task, data, world, "counting words:"):
        if batch.num_rows:
            counts += encoder.document_counts(**batch.inputs)
    encoder.start_from(all_reduce_sum(counts, world.group), data.num_samples)


@torch.no_grad()
def _set_rows_to_means(task: Task, data: RunData, world: World) -> int:
    """Set the row of each class to the mean features of its training samples. Classes without
    samples keep their random rows. Returns the number of classes of all ranks with samples.

    The ranks of a class group gather the features of a batch, and each adds up those of its own
    classes, so that the memory needed is that of the rows.
    """
    head, was_training = task.head, task.training
    group, held = head.engine.class_group, head.engine.weights.held
    sums = torch.zeros_like(head.weight)
    counts = torch.zeros(len(sums), dtype=torch.int64, device=world.device)
    task.eval()
    for batch in _first_epoch(task, data, world, "computing the mean features of each class:"):
        features, labels = all_rows(task.features(batch.inputs), group), labels_of(batch)
        class_ids = all_rows(class_ids_of(labels), group)
        here, positions = held.find(class_ids)
        if isinstance(labels, LabelSets):
            sets = LabelSets.of_sizes(class_ids, all_rows(labels.sizes, group))
            features = features[sets.row_of_label[here]]
        else:
            features = features[here]
        sums.index_add_(0, positions, features)
        counts += torch.bincount(positions, minlength=len(counts))
    task.train(was_training)
    all_reduce_sum(sums, head.engine.data_group)
    all_reduce_sum(counts, head.engine.data_group)
    has_samples = (counts > 0).unsqueeze(1)
    head.weight.copy_(torch.where(has_samples, sums / counts.unsqueeze(1), head.weight))
    return int(all_reduce_sum(has_samples.sum(), group))


def _first_epoch(task: Task, data: RunData, world: World, verb: str) -> Iterator[Batch]:
    """Yield this rank's shares of the batches of the first epoch, as training reads them, except
    that rows are not mixed. Every rank gets the same number of batches; the last may be empty. The
    main rank prints its progress from time to time, after `verb`."""
    recipe = task.recipe
    augment = recipe.data.augment.model_copy(update={"mix": None})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"augment": augment})})
    global_batch = recipe.train.global_batch
    mine = share(global_batch, world.rank, world.size)
    report = plain_lines(verb) if world.is_main else silent
    with data.open_loader(recipe, world, Cursor(recipe.seed)) as loader:
        for start in range(0, data.num_samples, global_batch):
            report(start, data.num_samples)
            batch = next(loader)
            # The last global batch continues with samples of the second epoch.
            rest = data.num_samples - start - mine.start
            yield batch.rows(0, min(max(rest, 0), batch.num_rows))
