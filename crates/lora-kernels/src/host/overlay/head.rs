//! Logits of overridden ids.

use super::{Overlay, ROWS, Rows, bytes, records};
use crate::host::check::{bad_index, refuse_overlap, route};
use crate::host::job::{Position, TileJob};
use crate::host::memory::{Arena, Span};
use crate::host::pool::Job;
use crate::host::simd::{LANES, Simd};
use crate::host::workspace::Workspace;
use crate::strided::Strided;
use crate::{DeltaParams, FLAG_F32_LOGITS, KernelError, LogitsParams, Operand, OverlaySlot};
use bytemuck::Zeroable;
use half::bf16;
use std::ops::Range;

const IDS: Operand = Operand::shared("overlay ids");
const LOGITS: Operand = Operand::shared("logits");

/// Overlay rows that one task of the head takes.
const HEAD_IDS: usize = 32;

/// Logits of either kind.
#[derive(Debug, Clone, Copy)]
enum Logits {
    Bf16(Span<bf16>),
    F32(Span<f32>),
}

/// Logits of overridden ids, checked.
pub(in crate::host) struct Head {
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
    pub(in crate::host) fn check(
        arena: &Arena,
        params: &LogitsParams,
    ) -> Result<Self, KernelError> {
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
    pub(in crate::host) fn products(&self) -> u64 {
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
pub(in crate::host) struct HeadJob<S> {
    simd: S,
    head: Head,
    tasks: Vec<(usize, Range<usize>)>,
}

impl<S: Simd> HeadJob<S> {
    pub(in crate::host) fn new(simd: S, head: Head) -> Self {
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
