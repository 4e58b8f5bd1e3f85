//! Sites: a packed adapter or a route, and the output its delta lands in.

use crate::view::ELEMENT;
use crate::{
    DeltaSite, KernelError, MAX_ENTRIES, MAX_RANK, MAX_WIDTH, MatMut, Operand, PAIR_ALIGN,
};
use bytemuck::Zeroable;
use lora_weights::RANK_GRANULE;
use lora_weights::device::{DevicePtr, LoraPair, LoraRoute};

/// One packed adapter for all rows, and where its delta lands.
#[derive(Debug, PartialEq)]
pub struct PairSite<'a> {
    /// The adapter.
    pub pair: LoraPair,
    /// `[rows, n_out]`, updated in place.
    pub out: MatMut<'a>,
}

/// Tables by which each row takes its own adapter, and where the deltas land.
#[derive(Debug, PartialEq)]
pub struct RouteSite<'a> {
    /// The tables.
    pub route: LoraRoute,
    /// `[rows, n_out]`, updated in place.
    pub out: MatMut<'a>,
}

/// What a launch needs of a site, pair or route.
pub(super) trait Site {
    /// Where the delta lands.
    fn out(&self) -> &MatMut<'_>;

    /// `k_in`, `n_out` and padded rank.
    fn sizes(&self) -> Sizes;

    /// Refuses what does not depend on other sites or on x.
    fn check(&self, index: u32) -> Result<(), KernelError>;

    /// Fills in what says which adapter.
    fn describe(&self, site: &mut DeltaSite);

    /// The site as kernels read it, but for the partials.
    fn to_params(&self) -> DeltaSite {
        let out = self.out();
        let mut site = DeltaSite {
            out: out.ptr().0,
            out_stride: out.row_stride() as u64,
            n_out: self.sizes().n_out,
            max_rank: self.sizes().max_rank,
            ..DeltaSite::zeroed()
        };
        self.describe(&mut site);
        site
    }
}

/// The sizes of a site.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) k_in: u32,
    pub(super) n_out: u32,
    pub(super) max_rank: u32,
}

impl Sizes {
    fn check(&self, index: u32) -> Result<(), KernelError> {
        let site = |name| Operand::of_site(name, index);
        let width = (1, MAX_WIDTH.into());
        KernelError::check_range(site("A"), "k_in", self.k_in.into(), width)?;
        KernelError::check_range(site("B"), "n_out", self.n_out.into(), width)?;
        let rank = u64::from(self.max_rank);
        KernelError::check_range(site("A"), "padded rank", rank, (1, MAX_RANK.into()))?;
        if !self.max_rank.is_multiple_of(RANK_GRANULE) {
            return Err(KernelError::UnpaddedRank {
                operand: site("A"),
                max_rank: self.max_rank,
                granule: RANK_GRANULE,
            });
        }
        Ok(())
    }
}

impl Site for PairSite<'_> {
    fn out(&self) -> &MatMut<'_> {
        &self.out
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            k_in: self.pair.k_in,
            n_out: self.pair.n_out,
            max_rank: self.pair.max_rank,
        }
    }

    fn check(&self, index: u32) -> Result<(), KernelError> {
        self.sizes().check(index)?;
        let (rank, max_rank) = (self.pair.rank.into(), self.pair.max_rank.into());
        KernelError::check_range(Operand::of_site("A", index), "rank", rank, (1, max_rank))?;
        KernelError::check_ptr(Operand::of_site("A", index), self.pair.a, PAIR_ALIGN)?;
        KernelError::check_ptr(Operand::of_site("B", index), self.pair.b, PAIR_ALIGN)
    }

    fn describe(&self, site: &mut DeltaSite) {
        site.a = self.pair.a.0;
        site.b = self.pair.b.0;
        site.scale = self.pair.scale;
        site.rank = self.pair.rank;
    }
}

impl Site for RouteSite<'_> {
    fn out(&self) -> &MatMut<'_> {
        &self.out
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            k_in: self.route.k_in,
            n_out: self.route.n_out,
            max_rank: self.route.max_rank,
        }
    }

    fn check(&self, index: u32) -> Result<(), KernelError> {
        self.sizes().check(index)?;
        let route = &self.route;
        let tables: [(&'static str, DevicePtr, u64); 4] = [
            ("A table", route.a_table, 8),
            ("B table", route.b_table, 8),
            ("scale table", route.scale_table, 4),
            ("rank table", route.rank_table, 4),
        ];
        let operand = Operand::of_site(tables[0].0, index);
        let entries = (1, MAX_ENTRIES.into());
        KernelError::check_range(operand, "entries", route.slots.into(), entries)?;
        for (name, ptr, align) in tables {
            KernelError::check_ptr(Operand::of_site(name, index), ptr, align)?;
        }
        Ok(())
    }

    fn describe(&self, site: &mut DeltaSite) {
        site.a_table = self.route.a_table.0;
        site.b_table = self.route.b_table.0;
        site.scale_table = self.route.scale_table.0;
        site.rank_table = self.route.rank_table.0;
    }
}

/// Refuses an out that does not have the launch's rows or its site's width.
pub(super) fn check_out(
    out: &MatMut<'_>,
    sizes: Sizes,
    rows: usize,
    index: u32,
) -> Result<(), KernelError> {
    let operand = Operand::of_site("out", index);
    check_equal(operand, "rows", out.rows(), (rows, "the other operands"))?;
    check_equal(
        operand,
        "columns",
        out.cols(),
        (sizes.n_out as usize, "the adapter's n_out"),
    )?;
    if out.rows() > 0 {
        KernelError::check_ptr(operand, out.ptr(), ELEMENT)?;
    }
    Ok(())
}

/// [`KernelError::SizeMismatch`] unless `found` is the expected size.
pub(crate) fn check_equal(
    operand: Operand,
    quantity: &'static str,
    found: usize,
    (expected, source_of_size): (usize, &'static str),
) -> Result<(), KernelError> {
    if found == expected {
        return Ok(());
    }
    Err(KernelError::SizeMismatch {
        operand,
        quantity,
        found: found as u64,
        expected: expected as u64,
        source_of_size,
    })
}
