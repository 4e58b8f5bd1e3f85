//! Packed adapters on the host and on a device, and the tables that route to them.

use super::{Fill, Rng};
use crate::{DeviceBuffer, KernelError};
use half::bf16;
use lora_weights::device::{DeviceMemory, DevicePtr, LoraPair, LoraRoute};
use lora_weights::padded_rank;
use std::sync::Arc;

/// NaN behind either matrix on a device, so that reading past its end shows.
const GUARD_ELEMENTS: usize = 1024;

/// One packed adapter on one module, in host memory.
#[derive(Debug, Clone, PartialEq)]
pub struct TestAdapter {
    /// `[max_rank, k_in]`, zero from row `rank` on.
    pub a: Vec<bf16>,
    /// `[n_out, max_rank]`, zero from column `rank` on.
    pub b: Vec<bf16>,
    /// True rank.
    pub rank: u32,
    /// Padded rank: what a pool would pack it at.
    pub max_rank: u32,
    /// Width of x.
    pub k_in: u32,
    /// Width of out.
    pub n_out: u32,
    /// FP32 scale.
    pub scale: f32,
}

impl TestAdapter {
    /// Random values that give deltas of about `scale` for x of root mean square 1.
    pub fn random(rng: &mut Rng, fill: Fill, rank: u32, (k_in, n_out): (u32, u32)) -> Self {
        let max_rank = padded_rank(rank);
        let (k, n, r) = (k_in as usize, n_out as usize, max_rank as usize);
        let terms = |count: u32| match fill {
            Fill::Signed => 1.0 / (count as f32).sqrt(),
            Fill::Coherent => 1.0 / count as f32,
        };
        let mut a = vec![bf16::ZERO; r * k];
        let mut b = vec![bf16::ZERO; n * r];
        for at in 0..rank as usize {
            // One sign for a rank's row of A and column of B: products stay positive.
            let sign = if rng.one_in(2) { 1.0 } else { -1.0 };
            for value in &mut a[at * k..(at + 1) * k] {
                *value = bf16::from_f32(sign * rng.value(fill, terms(k_in)));
            }
            for row in b.chunks_mut(r) {
                row[at] = bf16::from_f32(sign * rng.value(fill, terms(rank)));
            }
        }
        Self {
            a,
            b,
            rank,
            max_rank,
            k_in,
            n_out,
            scale: 0.5 + rng.below(0..8) as f32 / 4.0,
        }
    }

    /// The same adapter with zeros that count as rank: `rank` padded, and not below its own.
    pub fn at_rank(&self, rank: u32) -> Self {
        let rank = padded_rank(rank.max(self.rank));
        let mut a = self.a.clone();
        a.resize((rank * self.k_in) as usize, bf16::ZERO);
        let mut b = vec![bf16::ZERO; (self.n_out * rank) as usize];
        let (from, to) = (self.max_rank as usize, rank as usize);
        for (row, own) in b.chunks_mut(to).zip(self.b.chunks(from)) {
            row[..from].copy_from_slice(own);
        }
        Self {
            a,
            b,
            rank,
            max_rank: rank,
            ..self.clone()
        }
    }

    /// Copies it to a device.
    ///
    /// # Errors
    /// What allocation and upload give.
    pub fn upload(&self, memory: &Arc<dyn DeviceMemory>) -> Result<DeviceAdapter, KernelError> {
        let guarded = |values: &[bf16]| {
            let behind = [bf16::NAN; GUARD_ELEMENTS];
            DeviceBuffer::from_slice(Arc::clone(memory), &[values, &behind].concat())
        };
        let a = guarded(&self.a)?;
        let b = guarded(&self.b)?;
        let pair = LoraPair {
            a: a.ptr(),
            b: b.ptr(),
            rank: self.rank,
            k_in: self.k_in,
            n_out: self.n_out,
            scale: self.scale,
            max_rank: self.max_rank,
        };
        Ok(DeviceAdapter { a, b, pair })
    }
}

/// An adapter on a device; the pair points into its buffers.
#[derive(Debug)]
pub struct DeviceAdapter {
    /// A.
    pub a: DeviceBuffer,
    /// B.
    pub b: DeviceBuffer,
    /// What launches take.
    pub pair: LoraPair,
}

/// Tables of one site on a device; the route points into their buffers.
#[derive(Debug)]
pub struct DeviceTables {
    buffers: [DeviceBuffer; 4],
    route: LoraRoute,
}

impl DeviceTables {
    /// One entry a slot; `None` does not adapt the site. `shape`: the k_in and n_out of all entries, and the largest padded rank.
    ///
    /// # Errors
    /// What allocation and upload give.
    pub fn upload(
        memory: &Arc<dyn DeviceMemory>,
        slots: &[Option<LoraPair>],
        shape: (u32, u32, u32),
    ) -> Result<Self, KernelError> {
        let ptrs = |of: fn(&LoraPair) -> DevicePtr| -> Vec<u64> {
            slots
                .iter()
                .map(|pair| pair.as_ref().map_or(0, |pair| of(pair).0))
                .collect()
        };
        let scales: Vec<f32> = slots.iter().map(|p| p.map_or(0.0, |p| p.scale)).collect();
        let ranks: Vec<u32> = slots.iter().map(|p| p.map_or(0, |p| p.rank)).collect();
        let memory = || Arc::clone(memory);
        let buffers = [
            DeviceBuffer::from_slice(memory(), &ptrs(|pair| pair.a))?,
            DeviceBuffer::from_slice(memory(), &ptrs(|pair| pair.b))?,
            DeviceBuffer::from_slice(memory(), &scales)?,
            DeviceBuffer::from_slice(memory(), &ranks)?,
        ];
        let [a_table, b_table, scale_table, rank_table] = buffers.each_ref().map(DeviceBuffer::ptr);
        let (k_in, n_out, max_rank) = shape;
        Ok(Self {
            buffers,
            route: LoraRoute {
                a_table,
                b_table,
                scale_table,
                rank_table,
                slots: slots.len() as u32,
                k_in,
                n_out,
                max_rank,
            },
        })
    }

    /// What launches take.
    pub fn route(&self) -> LoraRoute {
        self.route
    }

    /// The four tables: A addresses, B addresses, scales, ranks.
    pub fn buffers(&self) -> &[DeviceBuffer; 4] {
        &self.buffers
    }
}
