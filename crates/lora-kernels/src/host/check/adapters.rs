//! From tables or a pair to adapters whose A and B lie in allocations.

use super::rows::Routed;
use super::{bad_index, strided_elements};
use crate::host::job::{Adapter, SiteJob};
use crate::host::memory::Arena;
use crate::params::site_scratch_bytes;
use crate::{DeltaParams, DeltaSite, KernelError, Operand, PAIR_ALIGN};
use lora_weights::device::DevicePtr;
use lora_weights::padded_rank;

/// A site with the adapter of each tile.
pub(super) fn check_site(
    arena: &Arena,
    params: &DeltaParams,
    (site, index): (&DeltaSite, u32),
    routed: &[Routed],
) -> Result<SiteJob, KernelError> {
    let of = |name| Operand::of_site(name, index);
    let scratch = site_scratch_bytes(
        params.k_in.into(),
        params.pass_rows.into(),
        site.max_rank.into(),
    );
    let out_elements = strided_elements(params.rows, site.out_stride, site.n_out);
    let tables = Tables::new(arena, params.slots, (site, index))?;
    let adapters = routed
        .iter()
        .map(|tile| tables.adapter(arena, tile.entry, params.k_in))
        .collect::<Result<_, _>>()?;
    Ok(SiteJob {
        out: arena.span(of("out"), site.out, out_elements)?,
        out_stride: site.out_stride as usize,
        n_out: site.n_out as usize,
        max_rank: site.max_rank as usize,
        partials: arena.span(
            of("partials"),
            site.partials,
            scratch / size_of::<f32>() as u64,
        )?,
        adapters,
    })
}

/// What a table entry, or the pair, says.
struct Entry {
    a: u64,
    b: u64,
    scale: f32,
    rank: u32,
}

/// The four tables of a routed site.
struct Lists<'a> {
    a: &'a [u64],
    b: &'a [u64],
    scale: &'a [f32],
    rank: &'a [u32],
}

/// A site's tables, or its pair.
struct Tables<'a> {
    site: &'a DeltaSite,
    index: u32,
    lists: Option<Lists<'a>>,
}

impl<'a> Tables<'a> {
    fn new(
        arena: &'a Arena,
        slots: u32,
        (site, index): (&'a DeltaSite, u32),
    ) -> Result<Self, KernelError> {
        let of = |name| Operand::of_site(name, index);
        let slots = slots.into();
        let lists = if site.a_table == 0 {
            None
        } else {
            Some(Lists {
                a: arena.list(of("A table"), site.a_table, slots)?,
                b: arena.list(of("B table"), site.b_table, slots)?,
                scale: arena.list(of("scale table"), site.scale_table, slots)?,
                rank: arena.list(of("rank table"), site.rank_table, slots)?,
            })
        };
        Ok(Self { site, index, lists })
    }

    /// `None` where the entry has no adapter here.
    fn entry(&self, entry: u32) -> Result<Option<Entry>, KernelError> {
        let at = entry as usize;
        let found = match &self.lists {
            None => Entry {
                a: self.site.a,
                b: self.site.b,
                scale: self.site.scale,
                rank: self.site.rank,
            },
            Some(lists) => Entry {
                a: lists.a[at],
                b: lists.b[at],
                scale: lists.scale[at],
                rank: lists.rank[at],
            },
        };
        if found.rank > self.site.max_rank {
            let operand = Operand::of_site("rank table", self.index);
            let limit = u64::from(self.site.max_rank) + 1;
            return Err(bad_index(operand, entry.into(), found.rank.into(), limit));
        }
        Ok((found.a != 0 && found.rank > 0).then_some(found))
    }

    /// Elements from one row of B to the next.
    fn b_stride(&self, rank: u32) -> u32 {
        match self.lists {
            None => self.site.max_rank,
            Some(_) => padded_rank(rank),
        }
    }

    /// The adapter of an entry, its addresses checked.
    fn adapter(
        &self,
        arena: &Arena,
        entry: u32,
        k_in: u32,
    ) -> Result<Option<Adapter>, KernelError> {
        let Some(entry) = self.entry(entry)? else {
            return Ok(None);
        };
        let of = |name| Operand::of_site(name, self.index);
        KernelError::check_ptr(of("A"), DevicePtr(entry.a), PAIR_ALIGN)?;
        KernelError::check_ptr(of("B"), DevicePtr(entry.b), PAIR_ALIGN)?;
        let a_elements = u64::from(entry.rank) * u64::from(k_in);
        let b_stride = self.b_stride(entry.rank);
        let b_elements = u64::from(self.site.n_out) * u64::from(b_stride);
        Ok(Some(Adapter {
            a: arena.span(of("A"), entry.a, a_elements)?,
            b: arena.span(of("B"), entry.b, b_elements)?,
            b_stride: b_stride as usize,
            rank: entry.rank as usize,
            scale: entry.scale,
        }))
    }
}
