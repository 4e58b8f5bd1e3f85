//! Whole-row operations on the CPU: every address is looked up before anything is written, as for deltas.

use super::check::{bad_index, refuse_overlap, route, strided_elements};
use super::job::{Position, TileJob};
use super::memory::{Arena, Span};
use super::pool::Job;
use super::simd::{LANES, Simd};
use super::workspace::Workspace;
use crate::strided::Strided;
use crate::{
    DeltaParams, FLAG_F32_LOGITS, FLAG_MULTIPLY, GatherRowsParams, KernelError, LogitsParams,
    MAX_WIDTH, Operand, OverlaySlot, PAIR_ALIGN, ReplaceRowsParams, RowDiffParams,
};
use bytemuck::{Pod, Zeroable};
use half::bf16;
use lora_weights::device::DevicePtr;
use std::ops::Range;

const ROWS: Operand = Operand::shared("overlay rows");
const IDS: Operand = Operand::shared("overlay ids");
const SLOT_MAP: Operand = Operand::shared("slot map");
const LOGITS: Operand = Operand::shared("logits");

/// Rows that one task of a row diff takes.
const DIFF_ROWS: usize = 256;

/// Overlay rows that one task of the head takes.
const HEAD_IDS: usize = 32;

/// A strided matrix of `T`, looked up whole.
#[derive(Debug, Clone, Copy)]
struct Rows<T> {
    span: Span<T>,
    stride: usize,
    cols: usize,
}

impl<T: Pod> Rows<T> {
    fn new(
        arena: &Arena,
        operand: Operand,
        (address, stride): (u64, u64),
        (rows, cols): (u32, u32),
    ) -> Result<Self, KernelError> {
        KernelError::check_range(operand, "columns", cols.into(), (1, MAX_WIDTH.into()))?;
        if rows > 1 && stride < u64::from(cols) {
            return Err(KernelError::StrideTooSmall {
                operand,
                stride,
                cols: cols.into(),
            });
        }
        Ok(Self {
            span: arena.span(operand, address, strided_elements(rows, stride, cols))?,
            stride: stride as usize,
            cols: cols as usize,
        })
    }

    fn range(self, row: usize) -> Range<usize> {
        row * self.stride..row * self.stride + self.cols
    }
}

/// A table that may have no rows, and then no address.
fn table(
    arena: &Arena,
    operand: Operand,
    place: (u64, u64),
    size: (u32, u32),
) -> Result<Option<Rows<bf16>>, KernelError> {
    match size.0 {
        0 => Ok(None),
        _ => Rows::new(arena, operand, place, size).map(Some),
    }
}

fn bytes<T>(address: u64, stride: u64, (rows, cols): (u32, u32)) -> Strided {
    let size = size_of::<T>() as u64;
    Strided {
        base: address,
        rows: rows.into(),
        width: u64::from(cols) * size,
        stride: stride.saturating_mul(size),
    }
}

/// Rows of two tables, and where their distances go.
pub(super) struct DiffJob {
    a: Rows<bf16>,
    b: Rows<bf16>,
    distances: Span<f32>,
    rows: usize,
}

impl DiffJob {
    pub(super) fn check(arena: &Arena, params: &RowDiffParams) -> Result<Self, KernelError> {
        let size = (params.rows, params.cols);
        let [first, second] = ["first table", "second table"].map(Operand::shared);
        let out = Operand::shared("distances");
        let job = Self {
            a: Rows::new(arena, first, (params.a, params.a_stride), size)?,
            b: Rows::new(arena, second, (params.b, params.b_stride), size)?,
            distances: arena.span(out, params.distances, params.rows.into())?,
            rows: params.rows as usize,
        };
        let written = [(
            out,
            Strided::contiguous(params.distances, job.distances.bytes()),
        )];
        let a = bytes::<bf16>(params.a, params.a_stride, size);
        let b = bytes::<bf16>(params.b, params.b_stride, size);
        refuse_overlap(&written, (first, a))?;
        refuse_overlap(&written, (second, b))?;
        Ok(job)
    }
}

impl Job for DiffJob {
    fn tasks(&self) -> [usize; 2] {
        [self.rows.div_ceil(DIFF_ROWS), 0]
    }

    fn run(&self, _: usize, task: usize, _: &mut Workspace) {
        let rows = task * DIFF_ROWS..self.rows.min((task + 1) * DIFF_ROWS);
        // SAFETY: the arena is held while the job runs; tasks have different rows, and distances meet no table (checked).
        let distances = unsafe { self.distances.write(rows.clone()) };
        for (distance, row) in distances.iter_mut().zip(rows) {
            // SAFETY: the arena is held, and no launch writes tables while it is.
            let (a, b) = unsafe {
                (
                    self.a.span.read(self.a.range(row)),
                    self.b.span.read(self.b.range(row)),
                )
            };
            *distance = row_distance(a, b);
        }
    }
}

/// Largest absolute difference; infinite where a NaN meets other bits.
fn row_distance(a: &[bf16], b: &[bf16]) -> f32 {
    let mut largest = 0_f32;
    for (a, b) in a.iter().zip(b) {
        let difference = (a.to_f32() - b.to_f32()).abs();
        let distance = if a.to_bits() == b.to_bits() {
            0.0
        } else if difference.is_nan() {
            f32::INFINITY
        } else {
            difference
        };
        largest = if distance > largest {
            distance
        } else {
            largest
        };
    }
    largest
}

/// Copies rows by the rule of [`GatherRowsParams`].
pub(super) fn gather(arena: &mut Arena, params: &GatherRowsParams) -> Result<(), KernelError> {
    let names = ["base table", "delta table", "out"].map(Operand::shared);
    let (base_size, delta_size) = (
        (params.base_rows, params.cols),
        (params.delta_rows, params.cols),
    );
    let base = table(
        arena,
        names[0],
        (params.base, params.base_stride),
        base_size,
    )?;
    let delta = table(
        arena,
        names[1],
        (params.delta, params.delta_stride),
        delta_size,
    )?;
    let size = (params.rows, params.cols);
    let out: Rows<bf16> = Rows::new(arena, names[2], (params.out, params.out_stride), size)?;
    let written = [(names[2], bytes::<bf16>(params.out, params.out_stride, size))];
    let of_base = bytes::<bf16>(params.base, params.base_stride, base_size);
    let of_delta = bytes::<bf16>(params.delta, params.delta_stride, delta_size);
    refuse_overlap(&written, (names[0], of_base))?;
    refuse_overlap(&written, (names[1], of_delta))?;
    let index_name = Operand::shared("row numbers");
    let index: &[u32] = arena.list(index_name, params.index, params.rows.into())?;
    let list = Strided::contiguous(params.index, u64::from(params.rows) * 4);
    refuse_overlap(&written, (index_name, list))?;
    for (to, &from) in index.iter().enumerate() {
        let found = match from.checked_sub(params.base_rows) {
            None => base.map(|table| (table, from)),
            Some(row) if row < params.delta_rows => delta.map(|table| (table, row)),
            Some(_) => None,
        };
        if let Some((table, row)) = found {
            // SAFETY: the arena is held exclusively, and out meets neither table nor index (checked).
            unsafe {
                let row = table.span.read(table.range(row as usize));
                out.span.write(out.range(to)).copy_from_slice(row);
            }
        }
    }
    Ok(())
}

/// An overlay whose rows are in an allocation.
struct Overlay {
    record: OverlaySlot,
    rows: Span<bf16>,
}

impl Overlay {
    /// The overlay of a slot; `None` where there is none.
    fn of_slot(
        arena: &Arena,
        entries: &[OverlaySlot],
        slot: u32,
        hidden: u32,
    ) -> Result<Option<Self>, KernelError> {
        let record = entries.get(slot as usize).copied();
        let Some(record) = record.filter(|record| record.rows != 0 && record.n_override > 0) else {
            return Ok(None);
        };
        KernelError::check_ptr(ROWS, DevicePtr(record.rows), PAIR_ALIGN)?;
        let elements = u64::from(record.n_override) * u64::from(hidden);
        let rows = arena.span(ROWS, record.rows, elements)?;
        Ok(Some(Self { record, rows }))
    }

    fn bytes(&self) -> Strided {
        Strided::contiguous(self.rows.address(), self.rows.bytes())
    }

    fn row(&self, place: u32, hidden: u32) -> Range<usize> {
        let (place, hidden) = (place as usize, hidden as usize);
        place * hidden..(place + 1) * hidden
    }
}

fn records(arena: &Arena, entries: u64, slots: u32) -> Result<&[OverlaySlot], KernelError> {
    arena.list(Operand::shared("overlay table"), entries, slots.into())
}

/// Replaces rows by the rule of [`ReplaceRowsParams`].
pub(super) fn replace(arena: &mut Arena, params: &ReplaceRowsParams) -> Result<(), KernelError> {
    let size = (params.rows, params.hidden);
    let name = Operand::shared("embedding rows");
    let out: Rows<bf16> = Rows::new(arena, name, (params.out, params.out_stride), size)?;
    let written = [(name, bytes::<bf16>(params.out, params.out_stride, size))];
    let entries = records(arena, params.entries, params.slots)?;
    let list = |name, ptr| arena.list::<i32>(Operand::shared(name), ptr, params.rows.into());
    let tokens = list("tokens", params.token_ids)?;
    let slots = match params.seq_slot {
        0 => None,
        ptr => Some(list("row slots", ptr)?),
    };
    let mut copies = Vec::new();
    for (row, &token) in tokens.iter().enumerate() {
        let slot = match slots {
            Some(slots) => slots[row] as u32,
            None => params.slot,
        };
        // A negative number is past every limit once it is unsigned.
        let Some(token) = Some(token as u32).filter(|token| *token < params.vocab) else {
            continue;
        };
        let Some(overlay) = Overlay::of_slot(arena, entries, slot, params.hidden)? else {
            continue;
        };
        if overlay.record.slot_map == 0 {
            continue;
        }
        let map: &[i32] = arena.list(SLOT_MAP, overlay.record.slot_map, params.vocab.into())?;
        let place = map[token as usize] as u32;
        if place < overlay.record.n_override {
            refuse_overlap(&written, (ROWS, overlay.bytes()))?;
            copies.push((row, overlay.rows, overlay.row(place, params.hidden)));
        }
    }
    let multiplier = (params.flags & FLAG_MULTIPLY != 0).then_some(params.multiplier);
    for (row, from, range) in copies {
        // SAFETY: the arena is held exclusively, and out meets no overlay that is read (checked).
        let (from, to) = unsafe { (from.read(range), out.span.write(out.range(row))) };
        match multiplier {
            None => to.copy_from_slice(from),
            Some(by) => {
                for (to, from) in to.iter_mut().zip(from) {
                    *to = bf16::from_f32(from.to_f32() * by);
                }
            }
        }
    }
    Ok(())
}

/// Logits of either kind.
#[derive(Debug, Clone, Copy)]
enum Logits {
    Bf16(Span<bf16>),
    F32(Span<f32>),
}

/// Logits of overridden ids, checked.
pub(super) struct Head {
    x: Rows<bf16>,
    logits: Logits,
    logits_stride: usize,
    vocab: u32,
    positions: Vec<Position>,
    /// Tiles whose slot has an overlay.
    tiles: Vec<(TileJob, Span<bf16>, Span<u32>)>,
}

impl Head {
    /// Looks up everything that the launch reads and writes.
    pub(super) fn check(arena: &Arena, params: &LogitsParams) -> Result<Self, KernelError> {
        let size = (params.rows, params.k_in);
        let x_name = Operand::shared("hidden rows");
        let x = Rows::new(arena, x_name, (params.x, params.x_stride), size)?;
        let (logits, bytes_written) = logits_of(arena, params)?;
        let written = [(LOGITS, bytes_written)];
        refuse_overlap(
            &written,
            (x_name, bytes::<bf16>(params.x, params.x_stride, size)),
        )?;
        let entries = records(arena, params.entries, params.slots)?;
        let (routed, positions) = route(arena, &tiles_of(params))?;
        refuse_repeats(&positions, params.rows)?;
        let mut tiles = Vec::new();
        for tile in routed {
            let slot = if params.tiles == 0 {
                params.slot
            } else {
                tile.entry
            };
            let Some(overlay) = Overlay::of_slot(arena, entries, slot, params.k_in)? else {
                continue;
            };
            if overlay.record.ids == 0 {
                continue;
            }
            let ids: Span<u32> =
                arena.span(IDS, overlay.record.ids, overlay.record.n_override.into())?;
            refuse_overlap(&written, (ROWS, overlay.bytes()))?;
            let list = Strided::contiguous(ids.address(), ids.bytes());
            refuse_overlap(&written, (IDS, list))?;
            refuse_disorder(arena, &overlay.record)?;
            tiles.push((tile.job, overlay.rows, ids));
        }
        Ok(Self {
            x,
            logits,
            logits_stride: params.logits_stride as usize,
            vocab: params.vocab,
            positions,
            tiles,
        })
    }

    /// Products of the whole head.
    pub(super) fn products(&self) -> u64 {
        let tiles = self.tiles.iter();
        tiles
            .map(|(tile, rows, _)| (tile.positions.len() * (rows.bytes() as usize / 2)) as u64)
            .sum()
    }
}

fn logits_of(arena: &Arena, params: &LogitsParams) -> Result<(Logits, Strided), KernelError> {
    let place = (params.logits, params.logits_stride);
    let size = (params.rows, params.vocab);
    if params.flags & FLAG_F32_LOGITS == 0 {
        let rows = Rows::new(arena, LOGITS, place, size)?;
        Ok((
            Logits::Bf16(rows.span),
            bytes::<bf16>(place.0, place.1, size),
        ))
    } else {
        let rows = Rows::new(arena, LOGITS, place, size)?;
        Ok((Logits::F32(rows.span), bytes::<f32>(place.0, place.1, size)))
    }
}

/// The tiles as a delta launch would name them.
fn tiles_of(params: &LogitsParams) -> DeltaParams {
    DeltaParams {
        tiles: params.tiles,
        tile_count: params.tile_count,
        perm: params.perm,
        rows: params.rows,
        x_row_count: params.rows,
        x_div: 1,
        tile_rows: params.tile_rows.max(1),
        slots: params.slots,
        pass_rows: params.rows,
        max_tiles: params.max_tiles,
        ..DeltaParams::zeroed()
    }
}

/// Refuses two tiles that share a row: their logits are written side by side.
fn refuse_repeats(positions: &[Position], rows: u32) -> Result<(), KernelError> {
    let mut seen = vec![false; rows as usize];
    for position in positions {
        if std::mem::replace(&mut seen[position.out_row], true) {
            let row = position.out_row as u32;
            return Err(KernelError::RepeatedRow { row });
        }
    }
    Ok(())
}

/// Refuses ids that do not ascend: logits of one id twice would be written side by side.
fn refuse_disorder(arena: &Arena, record: &OverlaySlot) -> Result<(), KernelError> {
    let ids: &[u32] = arena.list(IDS, record.ids, record.n_override.into())?;
    match ids.windows(2).position(|pair| pair[0] >= pair[1]) {
        Some(at) => {
            let (value, limit) = (ids[at].into(), ids[at + 1].into());
            Err(bad_index(IDS, at as u64, value, limit))
        }
        None => Ok(()),
    }
}

/// Tasks of a checked head, in the instructions of `S`: a tile and some of its overlay's rows each.
pub(super) struct HeadJob<S> {
    simd: S,
    head: Head,
    tasks: Vec<(usize, Range<usize>)>,
}

impl<S: Simd> HeadJob<S> {
    pub(super) fn new(simd: S, head: Head) -> Self {
        let tasks = head
            .tiles
            .iter()
            .enumerate()
            .flat_map(|(tile, (_, _, ids))| {
                let count = ids.bytes() as usize / size_of::<u32>();
                let starts = (0..count).step_by(HEAD_IDS);
                starts.map(move |at| (tile, at..count.min(at + HEAD_IDS)))
            });
        Self {
            simd,
            tasks: tasks.collect(),
            head,
        }
    }
}

impl<S: Simd> Job for HeadJob<S> {
    fn tasks(&self) -> [usize; 2] {
        [self.tasks.len(), 0]
    }

    fn run(&self, _: usize, task: usize, _: &mut Workspace) {
        let (tile, places) = &self.tasks[task];
        let head = &self.head;
        let (tile, rows, ids) = &head.tiles[*tile];
        let hidden = head.x.cols;
        for position in &head.positions[tile.positions.clone()] {
            for place in places.clone() {
                // SAFETY: the arena is held while the job runs, and logits meet neither hidden rows nor overlays (checked).
                let (x, row, id) = unsafe {
                    (
                        head.x.span.read(head.x.range(position.x_row)),
                        rows.read(place * hidden..(place + 1) * hidden),
                        ids.read(place..place + 1)[0],
                    )
                };
                if id >= head.vocab {
                    continue;
                }
                let value = self.simd.vectorize(|| dot(self.simd, x, row));
                let at = position.out_row * head.logits_stride + id as usize;
                // SAFETY: the arena is held; rows of all tiles are different, and so are the ids of an overlay (checked), so no two tasks
                // write one element.
                unsafe {
                    match head.logits {
                        Logits::Bf16(logits) => {
                            logits.write(at..at + 1)[0] = bf16::from_f32(value);
                        }
                        Logits::F32(logits) => logits.write(at..at + 1)[0] = value,
                    }
                }
            }
        }
    }
}

/// Chains of 16 lanes that a dot product keeps, enough to hide the latency of an addition.
const CHAINS: usize = 4;

/// Sum of products: vectors of 16 lanes go to four chains in turn, the chains are added in order, then the lanes.
#[inline(always)]
fn dot<S: Simd>(simd: S, x: &[bf16], row: &[bf16]) -> f32 {
    let (x_vectors, x_rest) = x.as_chunks::<LANES>();
    let (row_vectors, row_rest) = row.as_chunks::<LANES>();
    let mut sums = [simd.splat(0.0); CHAINS];
    let step = |sum: &mut S::V, x: &[bf16; LANES], row: &[bf16; LANES]| {
        *sum = simd.fma(simd.widen(x), simd.widen(row), *sum);
    };
    let (x_sets, x_left) = x_vectors.as_chunks::<CHAINS>();
    let (row_sets, row_left) = row_vectors.as_chunks::<CHAINS>();
    for (x, row) in x_sets.iter().zip(row_sets) {
        for chain in 0..CHAINS {
            step(&mut sums[chain], &x[chain], &row[chain]);
        }
    }
    for ((sum, x), row) in sums.iter_mut().zip(x_left).zip(row_left) {
        step(sum, x, row);
    }
    let padded = |rest: &[bf16]| {
        let mut vector = [bf16::ZERO; LANES];
        vector[..rest.len()].copy_from_slice(rest);
        vector
    };
    step(&mut sums[CHAINS - 1], &padded(x_rest), &padded(row_rest));
    let one = simd.splat(1.0);
    let [first, rest @ ..] = sums;
    simd.sum(
        rest.into_iter()
            .fold(first, |sum, next| simd.fma(next, one, sum)),
    )
}
