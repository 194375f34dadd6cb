"""`kway import`: turns a classifier of another library into a bundle, without training."""

from pathlib import Path
from typing import Annotated

import typer

from data.messages import kway_command, printable
from launch.output_path import check_new, explain_write_errors


def import_model(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|hub:NAME",
            help="folder of a transformers or timm classifier, or its name on the Hugging Face Hub",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the bundle")],
    class_names: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="text file with one class name per line; default: the names in the model",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="maximum number of tokens of a text; default: that of the tokenizer or model",
            min=1,
        ),
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="also export the backbone for ONNX Runtime")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing bundle")] = False,
) -> None:
    """Turn a trained classifier of transformers or timm into a bundle.

    Reads only safetensors weights, not pickles. Before the bundle is published, its logits are
    compared with those of the original model.
    """
    check_new(out, force=force)
    from transformers.utils import logging

    from trainer.importing.classifier import import_classifier

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    with explain_write_errors(out, "--out"):
        found = import_classifier(
            source, out, class_names=class_names, max_length=max_length, onnx=onnx, force=force
        )
    print(printable(f"{source}: {found.architecture}, {found.num_classes:,} classes"))
    print(f"largest difference of a logit: {found.difference:.1e} of the largest logit")
    if found.num_renamed:
        print(f"renamed {found.num_renamed:,} classes without a unique name after their class IDs")
    print(f"{printable(str(out))} is ready: {kway_command('serve', out)}")
