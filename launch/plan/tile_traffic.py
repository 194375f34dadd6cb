"""The traffic of a class block that is computed with tiles (`heads/tiles`): the bytes that the
multiprocessors (SMs) read from and write to the L2 cache, and those that the cache reads from and
writes to the memory (HBM).

A block runs four kernels: `statistics_kernel` in the forward pass, and in the backward pass
`gradient_kernel` and two matrix products. The simulation steps through the programs of each kernel
in the order of their numbers. All programs that the SMs run at the same time form a wave and
advance in lockstep, so a piece of a matrix that several of them need is read from memory at most
once per step:

    8,192 rows are 64 groups of 128 rows. 132 SMs run programs 0 to 131: all 64 groups of rows with
    classes 0 to 127 and 128 to 255, and 4 groups with classes 256 to 383. In each step, they read
    64 + 3 pieces of features and class rows, and not 2 x 132.

The cache holds pieces of 64 x 64 numbers. It is fully associative, and evicts the least recently
used piece; a written piece is written to memory when it is evicted. Real caches consist of two
partitions, which can hold the same piece twice, so their effective size may be smaller.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.utils._pytree import tree_leaves

from heads.losses.tile import Tile
from heads.tiles.launch import num_splits_of
from heads.tiles.operators import KernelConfig, kernel_config
from launch.plan.cluster import Machine
from launch.plan.head_cost import HeadShape
from launch.plan.operations import Operation, Operations, Products, TensorShape
from trainer.strategies.cost import FLOAT32

_HALF = 2  # bytes
_EDGE = 64  # rows and columns of a piece
# Programs that an SM runs at the same time.
_PROGRAMS = 1
# cuBLAS computes products in tiles of this size. It may choose another size.
PRODUCT_TILE = 128, 128


@dataclass(frozen=True)
class Traffic:
    """The bytes of a kernel. l2: between the SMs and the cache; hbm: between the cache and the
    memory."""

    l2: int = 0
    hbm: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.l2 + other.l2, self.hbm + other.hbm)


@dataclass(frozen=True)
class BlockTraffic:
    """The traffic of the kernels of one class block."""

    statistics: Traffic
    gradient: Traffic
    column_sum: Traffic
    feature_product: Traffic
    row_product: Traffic

    @property
    def products(self) -> tuple[Traffic, ...]:
        """The kernels that compute a product of rows x classes x features each."""
        return self.statistics, self.gradient, self.feature_product, self.row_product

    @property
    def total(self) -> Traffic:
        return sum(self.products, self.column_sum)


@dataclass(frozen=True)
class Matrix:
    """A matrix in memory. Its name identifies it in the cache."""

    name: str
    rows: int
    columns: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.itemsize

    def pieces(self, row: int, num_rows: int, column: int, num_columns: int) -> Iterator["Piece"]:
        """Yield the pieces of a rectangle, whose edges are multiples of 64 or those of the
        matrix."""
        for i in range(row // _EDGE, -(-min(row + num_rows, self.rows) // _EDGE)):
            height = min(_EDGE, self.rows - i * _EDGE)
            for j in range(column // _EDGE, -(-min(column + num_columns, self.columns) // _EDGE)):
                width = min(_EDGE, self.columns - j * _EDGE)
                yield (self.name, i, j), height * width * self.itemsize


Position = tuple[str, int, int]
Piece = tuple[Position, int]  # and its size in bytes


class Cache:
    """A least-recently-used, write-back cache of pieces of matrices, and the traffic so far."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, 0
        self._pieces: OrderedDict[Position, tuple[int, bool]] = OrderedDict()
        self.hbm = 0

    def read(self, pieces: Iterable[Piece]) -> None:
        for position, size in pieces:
            held = self._pieces.get(position)
            if held is None:
                self.hbm += size
                self._put(position, size, is_changed=False)
            else:
                self._pieces.move_to_end(position)

    def write(self, pieces: Iterable[Piece]) -> None:
        for position, size in pieces:
            if position in self._pieces:
                self._used -= self._pieces.pop(position)[0]
            self._put(position, size, is_changed=True)

    def flush(self) -> None:
        """Write all changed pieces to memory and empty the cache."""
        self._evict(0)

    def _put(self, position: Position, size: int, *, is_changed: bool) -> None:
        self._pieces[position] = size, is_changed
        self._used += size
        self._evict(self._capacity)

    def _evict(self, capacity: int) -> None:
        while self._used > capacity:
            _, (size, is_changed) = self._pieces.popitem(last=False)
            self._used -= size
            self.hbm += is_changed * size


@dataclass(frozen=True)
class TileBlock:
    """A block of `classes` for `rows` of the batch, on a GPU with `num_sms` SMs and a cache of
    `cache_bytes`.

    itemsize: bytes per number of features, class rows and gradients of logits. The gradients of
    features and class rows are float32. sums_columns: the gradient is also summed per class, for
    the bias.
    """

    rows: int
    classes: int
    dim: int
    itemsize: int
    sums_columns: bool
    config: KernelConfig
    num_sms: int
    cache_bytes: int


@lru_cache(maxsize=64)
def block_traffic(block: TileBlock) -> BlockTraffic:
    """Simulate the kernels of one block.

    Earlier blocks have read the features, but not the class rows of this block.
    """
    return _Simulation(block).run()


class _Simulation:
    def __init__(self, block: TileBlock) -> None:
        self._block = block
        rows, classes, dim, size = block.rows, block.classes, block.dim, block.itemsize
        self._features = Matrix("features", rows, dim, size)
        self._rows = Matrix("class rows", classes, dim, size)
        self._grad = Matrix("gradient of logits", rows, classes, size)
        self._tile = block.config.rows, block.config.classes
        self._cache, self._traffic = Cache(block.cache_bytes), Traffic()

    def run(self) -> BlockTraffic:
        self._start()
        statistics = self._statistics()
        self._start()
        gradient = self._gradient()
        column_sum = self._column_sum() if self._block.sums_columns else Traffic()
        feature_product = self._feature_product()
        row_product = self._row_product()
        return BlockTraffic(statistics, gradient, column_sum, feature_product, row_product)

    def _start(self) -> None:
        """Start a pass with the features in the cache, as far as they fit."""
        self._cache = Cache(self._block.cache_bytes)
        self._cache.read(_all_of(self._features))
        self._cache.hbm = 0

    def _statistics(self) -> Traffic:
        groups, tiles = self._row_groups, self._tiles
        splits = num_splits_of(groups, tiles, self._block.num_sms)
        operands = _Operand(self._features), _Operand(self._rows)
        for wave in self._waves(groups * splits):
            for first in range(0, tiles, splits):
                computed = [(p % groups, first + p // groups) for p in wave]
                computed = [(group, tile) for group, tile in computed if tile < tiles]
                self._multiply(computed, *operands, self._block.dim, self._tile)
        return self._finish()

    def _gradient(self) -> Traffic:
        groups = self._row_groups
        operands = _Operand(self._features), _Operand(self._rows)
        for wave in self._waves(groups * self._tiles):
            computed = [(p % groups, p // groups) for p in wave]
            self._multiply(computed, *operands, self._block.dim, self._tile)
            self._write(computed, self._grad, self._tile)
        return self._finish()

    def _column_sum(self) -> Traffic:
        self._cache.read(_all_of(self._grad))
        self._traffic += Traffic(l2=self._grad.bytes)
        return self._finish()

    def _feature_product(self) -> Traffic:
        out = Matrix("gradient of features", self._block.rows, self._block.dim, FLOAT32)
        operands = _Operand(self._grad), _Operand(self._rows, transposed=True)
        self._product(*operands, out, inner=self._block.classes, adds=True)
        return self._finish()

    def _row_product(self) -> Traffic:
        out = Matrix("gradient of class rows", self._block.classes, self._block.dim, FLOAT32)
        left = _Operand(self._grad, transposed=True)
        right = _Operand(self._features, transposed=True)
        self._product(left, right, out, inner=self._block.rows, adds=False)
        self._cache.flush()
        return self._finish()

    def _product(
        self, left: "_Operand", right: "_Operand", out: Matrix, *, inner: int, adds: bool
    ) -> None:
        """Compute a product tile by tile, row by row of the result. `adds`: it is added to the
        previous contents of the result."""
        height, width = PRODUCT_TILE
        across = -(-out.columns // width)
        for wave in self._waves(-(-out.rows // height) * across):
            computed = [(p // across, p % across) for p in wave]
            if adds:
                for i, j in computed:
                    self._read(out.pieces(i * height, height, j * width, width))
            self._multiply(computed, left, right, inner, PRODUCT_TILE)
            self._write(computed, out, PRODUCT_TILE)

    def _multiply(
        self,
        computed: Sequence[tuple[int, int]],
        left: "_Operand",
        right: "_Operand",
        inner: int,
        tile: tuple[int, int],
    ) -> None:
        """Compute tiles of a product in lockstep, given their indices."""
        height, width = tile
        rows, columns = Counter(i for i, _ in computed), Counter(j for _, j in computed)
        l2 = 0
        for k in range(0, inner, _EDGE):
            for operand, edge, counts in ((left, height, rows), (right, width, columns)):
                for index, number in counts.items():
                    pieces = list(operand.pieces(index * edge, edge, k))
                    self._cache.read(pieces)
                    l2 += number * sum(size for _, size in pieces)
        self._traffic += Traffic(l2=l2)

    def _read(self, pieces: Iterable[Piece]) -> None:
        pieces = list(pieces)
        self._cache.read(pieces)
        self._traffic += Traffic(l2=sum(size for _, size in pieces))

    def _write(
        self, computed: Iterable[tuple[int, int]], out: Matrix, tile: tuple[int, int]
    ) -> None:
        height, width = tile
        for i, j in computed:
            pieces = list(out.pieces(i * height, height, j * width, width))
            self._cache.write(pieces)
            self._traffic += Traffic(l2=sum(size for _, size in pieces))

    def _finish(self) -> Traffic:
        """Return the traffic of a kernel, and start to count that of the next one."""
        found = self._traffic + Traffic(hbm=self._cache.hbm)
        self._traffic, self._cache.hbm = Traffic(), 0
        return found

    def _waves(self, num_programs: int) -> Iterator[range]:
        at_once = _PROGRAMS * max(1, self._block.num_sms)
        for first in range(0, num_programs, at_once):
            yield range(first, min(first + at_once, num_programs))

    @property
    def _row_groups(self) -> int:
        return -(-self._block.rows // self._block.config.rows)

    @property
    def _tiles(self) -> int:
        return -(-self._block.classes // self._block.config.classes)


@dataclass(frozen=True)
class _Operand:
    """An operand of a product. If it is `transposed`, the inner dimension is that of its rows."""

    matrix: Matrix
    transposed: bool = False

    def pieces(self, start: int, size: int, inner: int) -> Iterator[Piece]:
        if self.transposed:
            return self.matrix.pieces(inner, _EDGE, start, size)
        return self.matrix.pieces(start, size, inner, _EDGE)


def _all_of(matrix: Matrix) -> Iterator[Piece]:
    return matrix.pieces(0, matrix.rows, 0, matrix.columns)


@dataclass(frozen=True)
class KernelOperation(Operation):
    """A kernel of a class block with tiles. bytes: between the cache and the memory; l2: between
    the SMs and the cache."""

    l2: int = 0


def with_tiles(
    operations: Operations,
    rows: int,
    head: HeadShape,
    machine: Machine,
    tile: Tile,
    *,
    one_block: bool = False,
) -> Operations:
    """Replace the operations on logits by the kernels of `heads/tiles` and two products, with the
    bytes that they read from and write to memory.

    Operations on logits are those that read or write a tensor of `rows` x classes of a block, and
    those with the FLOPs of one of the products of a block. The casts of class rows are replaced
    too: with tiles, a block has one in each pass. `one_block`: `operations` are those of one full
    block, and not those of a step.
    """
    sizes = Counter({head.block_classes: head.calls * (head.computed // head.block_classes)})
    if rest := head.computed % head.block_classes:
        sizes[rest] += head.calls
    kept = Counter(
        {
            each: num
            for each, num in operations.items()
            if not _is_replaced(each, rows, head, set(sizes))
        }
    )
    if one_block:
        sizes = Counter({head.block_classes: 1})
    for classes, num_blocks in sizes.items():
        for kernel in tile_kernels(head, machine, tile, classes):
            kept[kernel] += num_blocks
    return kept


def tile_kernels(
    head: HeadShape, machine: Machine, tile: Tile, classes: int
) -> Iterator[Operation]:
    """Yield the kernels of one block of `classes`, including casts of its class rows."""
    dtype = torch.bfloat16 if head.itemsize == _HALF else torch.float32
    block = TileBlock(
        rows=head.group_rows,
        classes=classes,
        dim=head.dim,
        itemsize=head.itemsize,
        sums_columns=head.per_node > head.dim,
        config=kernel_config(tile, dtype, machine.capability),
        num_sms=machine.num_sms,
        cache_bytes=machine.cache_bytes,
    )
    traffic = block_traffic(block)
    flops = 2 * head.group_rows * classes * head.dim
    products: Products = "half" if head.itemsize == _HALF else "single"
    for each in traffic.products:
        yield KernelOperation(flops=flops, bytes=each.hbm, products=products, l2=each.l2)
    if head.itemsize == _HALF and head.row_dtype != torch.bfloat16:
        cast = Operation(bytes=classes * head.dim * (head.row_dtype.itemsize + _HALF))
        yield from (cast, cast)
    if block.sums_columns:
        yield KernelOperation(bytes=traffic.column_sum.hbm, l2=traffic.column_sum.l2)


def _is_replaced(operation: Operation, rows: int, head: HeadShape, block_classes: set[int]) -> bool:
    dim = head.dim
    if operation.flops:
        return operation.flops in {2 * rows * each * dim for each in block_classes}
    if operation.call is None:
        return False
    shapes = {
        each.shape
        for each in tree_leaves((operation.call.arguments, operation.call.options))
        if isinstance(each, TensorShape)
    }
    replaced = [(rows, each) for each in block_classes if each != dim]
    replaced += [shape[::-1] for shape in replaced]
    if operation.call.function is torch.ops.aten._to_copy.default and head.itemsize == _HALF:
        replaced += [(each, dim) for each in block_classes]
    return any(shape in shapes for shape in replaced)
