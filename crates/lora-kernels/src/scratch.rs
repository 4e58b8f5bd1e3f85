//! Room for what the two halves of a delta hand over, sized once.

use crate::params::site_scratch_bytes;
use crate::{DeviceBuffer, KernelError, MAX_RANK, MAX_SITES, MAX_WIDTH, Operand};
use lora_weights::device::{DeviceMemory, DevicePtr};
use lora_weights::padded_rank;
use std::sync::Arc;

const SCRATCH: Operand = Operand::shared("scratch");

/// Rows of a pass below which a launch is refused rather than cut: each pass is a launch of its own.
const LEAST_PASS_ROWS: u32 = 64;

/// The largest launch that a [`Scratch`] must hold in one pass: what it takes is a pure function of these four values.
///
/// A site takes about `ceil(k_in / 1024) * (pass rows + 128) * padded rank * 4` bytes, the FP32 sums of each k block, row and rank;
/// [`site_scratch_bytes`](crate::site_scratch_bytes) says it exactly. A launch that is larger still runs: with more rows it takes more passes, unless the backend
/// hands nothing over for it ([`uses_scratch`](crate::LoraBackend::uses_scratch)). One with fewer sites has their room, and takes fewer.
///
/// ```
/// use lora_kernels::{ScratchSpec, site_scratch_bytes};
///
/// let spec = ScratchSpec { max_rows: 256, max_rank: 50, max_sites: 3, max_k_in: 4096 };
/// assert_eq!(spec.bytes()?, 3 * site_scratch_bytes(4096, 256, 64));
/// # Ok::<(), lora_kernels::KernelError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScratchSpec {
    /// Most rows of a batch. Above [`PASS_ROWS`](Self::PASS_ROWS) they are done in passes.
    pub max_rows: u32,
    /// Largest rank, 1..=[`MAX_RANK`]; padded or not.
    pub max_rank: u32,
    /// Most sites of one launch, 1..=[`MAX_SITES`].
    pub max_sites: u32,
    /// Widest x.
    pub max_k_in: u32,
}

impl ScratchSpec {
    /// Rows of a pass at most: enough that a pass fills any device, few enough that scratch does not grow with the longest
    /// prompt. At rank 64 a pass takes 2 MiB for each 1024 columns of x.
    pub const PASS_ROWS: u32 = 8192;

    /// Rows that one pass of the largest launch takes.
    pub fn pass_rows(&self) -> u32 {
        self.max_rows.clamp(1, Self::PASS_ROWS)
    }

    /// Bytes of all sites together.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for sizes outside the limits.
    pub fn bytes(&self) -> Result<u64, KernelError> {
        let check = |quantity, value: u32, max: u32| {
            KernelError::check_range(SCRATCH, quantity, value.into(), (1, max.into()))
        };
        check("max_rank", self.max_rank, MAX_RANK)?;
        check("max_sites", self.max_sites, MAX_SITES as u32)?;
        check("max_k_in", self.max_k_in, MAX_WIDTH)?;
        let rank = padded_rank(self.max_rank);
        let site = site_bytes(self.max_k_in, self.pass_rows(), rank);
        Ok(u64::from(self.max_sites) * site)
    }
}

fn site_bytes(k_in: u32, pass_rows: u32, max_rank: u32) -> u64 {
    site_scratch_bytes(k_in.into(), pass_rows.into(), max_rank.into())
}

/// Device memory that the two halves of a delta share. Launches on one stream share one; launches that may run at the same time need
/// one each.
#[derive(Debug)]
pub struct Scratch {
    buffer: DeviceBuffer,
    spec: ScratchSpec,
}

/// How one launch lies in a scratch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Partition {
    /// Rows of a pass.
    pub(crate) pass_rows: u32,
    /// Partials of each site.
    pub(crate) partials: [DevicePtr; MAX_SITES],
}

impl Scratch {
    /// Allocates for `spec`.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for sizes outside the limits; what the allocation gives.
    pub fn new(memory: Arc<dyn DeviceMemory>, spec: ScratchSpec) -> Result<Self, KernelError> {
        Ok(Self {
            buffer: DeviceBuffer::zeroed(memory, spec.bytes()?)?,
            spec,
        })
    }

    /// What it was sized for.
    pub fn spec(&self) -> &ScratchSpec {
        &self.spec
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.buffer.bytes()
    }

    /// Shares it out among sites of the given padded ranks, with as many of `rows` rows a pass as fit.
    pub(crate) fn partition(
        &self,
        rows: u32,
        k_in: u32,
        max_ranks: &[u32],
    ) -> Result<Partition, KernelError> {
        let pass_rows = pass_rows(self.buffer.bytes(), rows, k_in, max_ranks)?;
        let mut partials = [DevicePtr::NULL; MAX_SITES];
        let mut at = self.buffer.ptr();
        for (site, &max_rank) in partials.iter_mut().zip(max_ranks) {
            *site = at;
            at = at.offset(site_bytes(k_in, pass_rows, max_rank));
        }
        Ok(Partition {
            pass_rows,
            partials,
        })
    }
}

/// The most rows a pass, at most `rows` and [`ScratchSpec::PASS_ROWS`], that fit `available` bytes.
fn pass_rows(available: u64, rows: u32, k_in: u32, max_ranks: &[u32]) -> Result<u32, KernelError> {
    let needed = |pass: u32| -> u64 {
        let sites = max_ranks.iter();
        sites.map(|&rank| site_bytes(k_in, pass, rank)).sum()
    };
    let wanted = rows.min(ScratchSpec::PASS_ROWS);
    if needed(wanted) <= available {
        return Ok(wanted);
    }
    let smallest = wanted.min(LEAST_PASS_ROWS);
    if needed(smallest) > available {
        return Err(KernelError::ScratchTooSmall {
            needed: needed(smallest),
            available,
            rows: smallest,
        });
    }
    // The largest that fits lies between one that does and one that does not.
    let (mut fits, mut too_many) = (smallest, wanted);
    while too_many - fits > 1 {
        let middle = fits + (too_many - fits) / 2;
        if needed(middle) <= available {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    Ok(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sites_of(spec: &ScratchSpec) -> u64 {
        spec.bytes().unwrap()
    }

    #[test]
    fn a_launch_it_was_sized_for_takes_one_pass() {
        for (max_rows, max_sites) in [(1, 1), (48, 2), (8192, 4)] {
            let spec = ScratchSpec {
                max_rows,
                max_rank: 50,
                max_sites,
                max_k_in: 5000,
            };
            let ranks = vec![64; max_sites as usize];
            let pass = pass_rows(sites_of(&spec), max_rows, 5000, &ranks).unwrap();
            assert_eq!(pass, max_rows);
        }
    }

    #[test]
    fn more_rows_take_passes_and_one_site_takes_the_whole() {
        let spec = ScratchSpec {
            max_rows: 200,
            max_rank: 16,
            max_sites: 4,
            max_k_in: 1024,
        };
        let bytes = sites_of(&spec);
        let four = pass_rows(bytes, 5000, 1024, &[16; 4]).unwrap();
        let one = pass_rows(bytes, 5000, 1024, &[16]).unwrap();
        // Room that alignment leaves may fit a row or two more.
        assert!((200..=202).contains(&four), "{four}");
        assert!(one > 4 * 200, "{one}");
    }

    #[test]
    fn too_small_a_scratch_names_what_it_needs() {
        let spec = ScratchSpec {
            max_rows: 1,
            max_rank: 16,
            max_sites: 1,
            max_k_in: 1024,
        };
        let error = pass_rows(sites_of(&spec), 100, 4096, &[64, 64]).unwrap_err();
        let KernelError::ScratchTooSmall {
            needed,
            available,
            rows,
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((available, rows), (spec.bytes().unwrap(), LEAST_PASS_ROWS));
        assert!(pass_rows(needed, 100, 4096, &[64, 64]).is_ok());
        assert!(pass_rows(needed - 1, 100, 4096, &[64, 64]).is_err());
    }

    #[test]
    fn sizes_outside_the_limits_are_refused() {
        let fits = ScratchSpec {
            max_rows: 0,
            max_rank: 512,
            max_sites: 4,
            max_k_in: 1 << 20,
        };
        assert!(fits.bytes().is_ok());
        for bad in [
            ScratchSpec {
                max_rank: 0,
                ..fits
            },
            ScratchSpec {
                max_rank: 513,
                ..fits
            },
            ScratchSpec {
                max_sites: 5,
                ..fits
            },
            ScratchSpec {
                max_k_in: (1 << 20) + 1,
                ..fits
            },
        ] {
            assert!(matches!(bad.bytes(), Err(KernelError::OutOfRange { .. })));
        }
    }

    proptest! {
        #[test]
        fn a_pass_is_the_largest_that_fits(
            available in 0_u64..1 << 26,
            rows in 1_u32..100_000,
            k_in in 1_u32..20_000,
            ranks in prop::collection::vec(prop::sample::select(vec![16_u32, 32, 64, 512]), 1..=4),
        ) {
            let needed = |pass| ranks.iter().map(|&r| site_bytes(k_in, pass, r)).sum::<u64>();
            match pass_rows(available, rows, k_in, &ranks) {
                Ok(pass) => {
                    prop_assert!(needed(pass) <= available);
                    let most = rows.min(ScratchSpec::PASS_ROWS);
                    prop_assert!(pass == most || needed(pass + 1) > available);
                }
                Err(_) => prop_assert!(needed(rows.min(LEAST_PASS_ROWS)) > available),
            }
        }
    }
}
