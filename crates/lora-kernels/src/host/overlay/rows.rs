//! Rows compared, copied and replaced.

use super::{Overlay, ROWS, Rows, bytes, records, table};
use crate::host::check::refuse_overlap;
use crate::host::memory::{Arena, Span};
use crate::host::pool::Job;
use crate::host::workspace::Workspace;
use crate::strided::Strided;
use crate::{
    FLAG_MULTIPLY, GatherRowsParams, KernelError, Operand, ReplaceRowsParams, RowDiffParams,
};
use half::bf16;

const SLOT_MAP: Operand = Operand::shared("slot map");

/// Rows that one task of a row diff takes.
const DIFF_ROWS: usize = 256;

/// Rows of two tables, and where their distances go.
pub(in crate::host) struct DiffJob {
    a: Rows<bf16>,
    b: Rows<bf16>,
    distances: Span<f32>,
    rows: usize,
}

impl DiffJob {
    pub(in crate::host) fn check(
        arena: &Arena,
        params: &RowDiffParams,
    ) -> Result<Self, KernelError> {
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
pub(in crate::host) fn gather(
    arena: &mut Arena,
    params: &GatherRowsParams,
) -> Result<(), KernelError> {
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

/// Replaces rows by the rule of [`ReplaceRowsParams`].
pub(in crate::host) fn replace(
    arena: &mut Arena,
    params: &ReplaceRowsParams,
) -> Result<(), KernelError> {
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
