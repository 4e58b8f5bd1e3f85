//! Whole-row operations on the CPU: every address is looked up before anything is written, as for deltas.

mod head;
mod rows;

pub(super) use head::{Head, HeadJob};
pub(super) use rows::{DiffJob, gather, replace};

use super::check::strided_elements;
use super::memory::{Arena, Span};
use crate::strided::Strided;
use crate::{KernelError, MAX_WIDTH, Operand, OverlaySlot, PAIR_ALIGN};
use bytemuck::Pod;
use half::bf16;
use lora_weights::device::DevicePtr;
use std::ops::Range;

const ROWS: Operand = Operand::shared("overlay rows");

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
