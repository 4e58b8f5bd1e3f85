//! Rows and adapters on a device, as benches have them.

use crate::testing::{DeviceTables, Fill, Rng, TestAdapter};
use crate::{BytesMoved, DeviceBuffer, KernelError, MatRef, RouteSite};
use half::bf16;
use lora_weights::device::{DeviceMemory, LoraPair};
use lora_weights::padded_rank;
use std::sync::Arc;

/// Times the L2 that is read between two uses of an adapter.
const COLD_L2S: u64 = 4;

/// One projection: out, and the adapters that are added to it.
pub(super) struct Projection {
    pub(super) out: Matrix,
    pub(super) adapters: Vec<TestAdapter>,
    copies: Vec<AdapterCopy>,
}

/// All adapters of a projection on the device, packed as a pool has them.
struct AdapterCopy {
    tables: DeviceTables,
    _a: DeviceBuffer,
    _b: DeviceBuffer,
}

impl Projection {
    /// `copies` copies of adapters that all have the same sizes, in tables of a pool for `pool_rank`.
    pub(super) fn upload(
        memory: &Arc<dyn DeviceMemory>,
        out: Matrix,
        adapters: Vec<TestAdapter>,
        (pool_rank, copies): (u32, usize),
    ) -> Result<Self, KernelError> {
        Ok(Self {
            out,
            copies: upload_copies(memory, &adapters, (pool_rank, copies))?,
            adapters,
        })
    }

    /// The delta of one copy, onto out.
    pub(super) fn site(&mut self, copy: usize) -> Result<RouteSite<'_>, KernelError> {
        let out = &mut self.out;
        Ok(RouteSite {
            route: self.copies[copy].tables.route(),
            out: out.buffer.mat_mut(out.rows, out.cols, out.cols)?,
        })
    }

    /// Puts back what out held at first.
    pub(super) fn reset(&mut self) -> Result<(), KernelError> {
        self.out.buffer.upload(0, &self.out.host)
    }
}

/// Rows on the device, and what they held at first.
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) host: Vec<bf16>,
    pub(super) buffer: DeviceBuffer,
}

impl Matrix {
    pub(super) fn random(
        memory: &Arc<dyn DeviceMemory>,
        rng: &mut Rng,
        (rows, cols): (u32, u32),
    ) -> Result<Self, KernelError> {
        let (rows, cols) = (rows as usize, cols as usize);
        let host = rng.values(rows * cols, Fill::Signed, 1.0);
        Ok(Self {
            rows,
            cols,
            buffer: DeviceBuffer::from_slice(Arc::clone(memory), &host)?,
            host,
        })
    }

    pub(super) fn view(&self) -> Result<MatRef<'_>, KernelError> {
        self.buffer.mat(self.rows, self.cols, self.cols)
    }

    pub(super) fn row(&self, row: usize) -> &[bf16] {
        &self.host[row * self.cols..][..self.cols]
    }
}

/// Copies of the adapters that a replay goes through, so that each is cold when its turn comes again; `bytes` are those of one copy.
pub(super) fn cold_copies(bytes: BytesMoved, l2_bytes: u64) -> usize {
    let cold = COLD_L2S * l2_bytes;
    // Rows are shared by the copies: they are read in between only where one copy has enough of them.
    if l2_bytes == 0 || bytes.x + bytes.out >= cold {
        return 1;
    }
    (cold.div_ceil(bytes.adapters.max(1)) + 1) as usize
}

/// Uploads `copies` copies of adapters that all have the same sizes, in tables of a pool for `pool_rank`.
fn upload_copies(
    memory: &Arc<dyn DeviceMemory>,
    adapters: &[TestAdapter],
    (pool_rank, copies): (u32, usize),
) -> Result<Vec<AdapterCopy>, KernelError> {
    let all =
        |of: fn(&TestAdapter) -> &[bf16]| adapters.iter().map(of).collect::<Vec<_>>().concat();
    let (a_values, b_values) = (all(|adapter| &adapter.a), all(|adapter| &adapter.b));
    let upload = |_| {
        let a = DeviceBuffer::from_slice(Arc::clone(memory), &a_values)?;
        let b = DeviceBuffer::from_slice(Arc::clone(memory), &b_values)?;
        let pair = |(index, adapter): (usize, &TestAdapter)| {
            Some(LoraPair {
                a: a.ptr().offset((index * size_of_val(&*adapter.a)) as u64),
                b: b.ptr().offset((index * size_of_val(&*adapter.b)) as u64),
                rank: adapter.rank,
                k_in: adapter.k_in,
                n_out: adapter.n_out,
                scale: adapter.scale,
                max_rank: adapter.max_rank,
            })
        };
        let pairs: Vec<Option<LoraPair>> = adapters.iter().enumerate().map(pair).collect();
        let shape = adapters.first().map_or((0, 0, 0), |adapter| {
            (adapter.k_in, adapter.n_out, padded_rank(pool_rank))
        });
        Ok(AdapterCopy {
            tables: DeviceTables::upload(memory, &pairs, shape)?,
            _a: a,
            _b: b,
        })
    };
    (0..copies).map(upload).collect()
}
