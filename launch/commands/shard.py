"""`kway shard`: sources -> webdataset shards with index and manifest; and a look at them."""

from typing import Annotated, Literal

import typer

from launch.commands import shard_images, shard_inspect, shard_text
from launch.commands.shard_writing import Out, PerShard, Workers, write

app = typer.Typer(help="Turn a source into shards, or look at shards.", no_args_is_help=True)

app.command()(shard_images.imagefolder)
app.command()(shard_images.imagenet)
app.command()(shard_images.cifar100)
app.command()(shard_images.cifar10)
app.command()(shard_images.mnist)
app.command()(shard_text.tweets)
app.command()(shard_text.table)
app.command()(shard_text.emoji_names)
app.command()(shard_inspect.check)
app.command()(shard_inspect.verify)
app.command()(shard_inspect.show)
app.command()(shard_inspect.index)


@app.command()
def glyphs(
    out: Out,
    classes: Annotated[
        int | None, typer.Option(min=2, help="only the first N, those of most faces; default: all")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="training pictures a class and face")] = 3,
    size: Annotated[int, typer.Option(min=8, help="side of a picture, pixels")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="of the distortions")] = 0,
    confusables: Annotated[
        Literal["merge", "keep"],
        typer.Option(help="characters that look the same, such as Latin and Greek A: one class?"),
    ] = "merge",
    samples_per_shard: PerShard = 10_000,
    workers: Workers = None,
) -> None:
    """Characters drawn from the fonts that matplotlib ships; needs no download."""
    from data.sources import Glyphs

    source = Glyphs(classes, samples=samples, size=size, seed=seed, confusables=confusables)
    write(source, out, samples_per_shard=samples_per_shard, workers=workers)
