//! Everything a launch names is checked here, once, before any of it runs: what comes out can be executed by safe arithmetic over checked spans.

use super::job::{Adapter, Delta, Position, SiteJob, TileJob};
use super::memory::Arena;
use crate::params::{counter_bytes, site_scratch_bytes};
use crate::strided::Strided;
use crate::{
    BLOCK_K, DeltaParams, DeltaSite, KernelError, LARGE_TILE_ROWS, MAX_RANK, MAX_SITES, MAX_WIDTH,
    Operand, PAIR_ALIGN, SMALL_TILE_ROWS, Tile,
};
use half::bf16;
use lora_weights::RANK_GRANULE;
use lora_weights::device::DevicePtr;

/// Bytes of a BF16 element.
const BF16: u64 = size_of::<bf16>() as u64;

/// A tile of the pass, with its table entry.
struct Routed {
    job: TileJob,
    entry: u32,
}

/// Checks `params` against the arena. `None` where there is nothing to do.
pub(super) fn check_delta(
    arena: &Arena,
    params: &DeltaParams,
) -> Result<Option<Delta>, KernelError> {
    check_sizes(params)?;
    if params.rows == 0 || params.site_count == 0 || params.pass_rows == 0 {
        return Ok(None);
    }
    let (routed, positions) = route(arena, params)?;
    let x_operand = Operand::shared("x");
    let x_elements = strided_elements(params.x_row_count, params.x_stride, params.k_in);
    let room = params.pass_rows as usize + LARGE_TILE_ROWS as usize;
    let sites = &params.sites[..params.site_count as usize];
    // Nothing here counts, but a device would.
    let max_rank = sites.iter().map(|site| site.max_rank).max().unwrap_or(0);
    let counters =
        counter_bytes(params.pass_rows.into(), max_rank.into()) / size_of::<u32>() as u64;
    arena.span::<u32>(Operand::shared("counters"), params.counters, counters)?;
    let delta = Delta {
        x: arena.span(x_operand, params.x, x_elements)?,
        x_stride: params.x_stride as usize,
        k_in: params.k_in as usize,
        k_blocks: params.k_blocks as usize,
        room,
        sites: sites
            .iter()
            .zip(0..)
            .map(|(site, index)| check_site(arena, params, (site, index), &routed))
            .collect::<Result<_, _>>()?,
        tiles: routed.into_iter().map(|tile| tile.job).collect(),
        positions,
    };
    check_overlaps(params, &delta)?;
    Ok(Some(delta))
}

/// Elements from the first to one past the last of a strided matrix; saturating, so that no allocation holds what does not fit.
fn strided_elements(rows: u32, stride: u64, cols: u32) -> u64 {
    match rows {
        0 => 0,
        rows => u64::from(rows - 1)
            .saturating_mul(stride)
            .saturating_add(cols.into()),
    }
}

fn check_sizes(params: &DeltaParams) -> Result<(), KernelError> {
    let shared = Operand::shared;
    let range = KernelError::check_range;
    let width = (1, u64::from(MAX_WIDTH));
    range(
        shared("launch"),
        "sites",
        params.site_count.into(),
        (0, MAX_SITES as u64),
    )?;
    range(shared("x"), "k_in", params.k_in.into(), width)?;
    let blocks = u64::from(params.k_in.div_ceil(BLOCK_K));
    range(
        shared("x"),
        "k blocks",
        params.k_blocks.into(),
        (blocks, blocks),
    )?;
    check_stride(
        shared("x"),
        params.x_stride,
        params.k_in,
        params.x_row_count,
    )?;
    if params.x_rows == 0 {
        range(
            shared("x"),
            "outs a row",
            params.x_div.into(),
            (1, u32::MAX.into()),
        )?;
    }
    let tile_rows = (SMALL_TILE_ROWS.into(), LARGE_TILE_ROWS.into());
    range(shared("tiles"), "rows", params.tile_rows.into(), tile_rows)?;
    for (site, index) in params.sites.iter().zip(0..params.site_count) {
        let of = |name| Operand::of_site(name, index);
        range(of("out"), "n_out", site.n_out.into(), width)?;
        range(
            of("A"),
            "padded rank",
            site.max_rank.into(),
            (1, MAX_RANK.into()),
        )?;
        if !site.max_rank.is_multiple_of(RANK_GRANULE) {
            return Err(KernelError::UnpaddedRank {
                operand: of("A"),
                max_rank: site.max_rank,
                granule: RANK_GRANULE,
            });
        }
        check_stride(of("out"), site.out_stride, site.n_out, params.rows)?;
    }
    Ok(())
}

fn check_stride(operand: Operand, stride: u64, cols: u32, rows: u32) -> Result<(), KernelError> {
    if rows > 1 && stride < u64::from(cols) {
        return Err(KernelError::StrideTooSmall {
            operand,
            stride,
            cols: cols.into(),
        });
    }
    Ok(())
}

fn bad_index(operand: Operand, index: u64, value: u64, limit: u64) -> KernelError {
    KernelError::BadIndex {
        operand,
        index,
        value,
        limit,
    }
}

/// The tiles of the pass that name a table entry, and their positions.
fn route(arena: &Arena, params: &DeltaParams) -> Result<(Vec<Routed>, Vec<Position>), KernelError> {
    let implied;
    let tiles: &[Tile] = if params.tiles == 0 {
        implied = implied_tiles(params);
        &implied
    } else {
        let count = arena.list::<u32>(Operand::shared("tile count"), params.tile_count, 1)?[0];
        if count > params.max_tiles {
            let limit = u64::from(params.max_tiles) + 1;
            return Err(bad_index(
                Operand::shared("tile count"),
                0,
                count.into(),
                limit,
            ));
        }
        arena.list(Operand::shared("tiles"), params.tiles, count.into())?
    };
    let maps = Maps::new(arena, params)?;
    let mut routed = Vec::with_capacity(tiles.len());
    let mut positions = Vec::new();
    let pass = params.pass_first..params.pass_first.saturating_add(params.pass_rows);
    let mut free = 0_u64;
    for (tile, index) in tiles.iter().zip(0_u64..) {
        let operand = Operand::shared("tiles");
        if tile.count == 0 || tile.count > params.tile_rows {
            return Err(bad_index(
                operand,
                index,
                tile.count.into(),
                u64::from(LARGE_TILE_ROWS) + 1,
            ));
        }
        let end = u64::from(tile.first) + u64::from(tile.count);
        if u64::from(tile.first) < free || end > params.rows.into() {
            return Err(bad_index(
                operand,
                index,
                tile.first.into(),
                params.rows.into(),
            ));
        }
        free = end;
        if tile.entry >= params.slots || !pass.contains(&tile.first) {
            continue;
        }
        let start = positions.len();
        for position in tile.first..tile.first + tile.count {
            positions.push(maps.position(position)?);
        }
        routed.push(Routed {
            job: TileJob {
                first: (tile.first - params.pass_first) as usize,
                positions: start..positions.len(),
            },
            entry: tile.entry,
        });
    }
    check_distinct(&routed, &positions)?;
    Ok((routed, positions))
}

/// Tiles of consecutive rows, where no list is given.
fn implied_tiles(params: &DeltaParams) -> Vec<Tile> {
    (0..params.rows)
        .step_by(params.tile_rows as usize)
        .map(|first| Tile {
            entry: 0,
            first,
            count: params.tile_rows.min(params.rows - first),
            reserved: 0,
        })
        .collect()
}

/// From positions to rows of out and of x.
struct Maps<'a> {
    perm: Option<&'a [u32]>,
    x_rows: Option<&'a [u32]>,
    params: &'a DeltaParams,
}

impl<'a> Maps<'a> {
    fn new(arena: &'a Arena, params: &'a DeltaParams) -> Result<Self, KernelError> {
        let list = |name, ptr: u64| match ptr {
            0 => Ok(None),
            ptr => arena
                .list::<u32>(Operand::shared(name), ptr, params.rows.into())
                .map(Some),
        };
        Ok(Self {
            perm: list("permutation", params.perm)?,
            x_rows: list("x rows", params.x_rows)?,
            params,
        })
    }

    fn position(&self, position: u32) -> Result<Position, KernelError> {
        let out_row = self.perm.map_or(position, |perm| perm[position as usize]);
        if out_row >= self.params.rows {
            let (value, limit) = (out_row.into(), self.params.rows.into());
            return Err(bad_index(
                Operand::shared("permutation"),
                position.into(),
                value,
                limit,
            ));
        }
        let x_row = match self.x_rows {
            Some(rows) => rows[out_row as usize],
            None => out_row / self.params.x_div,
        };
        if x_row >= self.params.x_row_count {
            let (value, limit) = (x_row.into(), self.params.x_row_count.into());
            return Err(bad_index(
                Operand::shared("x rows"),
                out_row.into(),
                value,
                limit,
            ));
        }
        Ok(Position {
            out_row: out_row as usize,
            x_row: x_row as usize,
        })
    }
}

/// Refuses a tile that names a row of out twice: its rows are written side by side. (Groupings never do.)
fn check_distinct(routed: &[Routed], positions: &[Position]) -> Result<(), KernelError> {
    for tile in routed {
        let rows = &positions[tile.job.positions.clone()];
        let ascending = rows.is_sorted_by(|a, b| a.out_row < b.out_row);
        let repeated = |i: &usize| rows[..*i].iter().any(|row| row.out_row == rows[*i].out_row);
        if !ascending && let Some(i) = (1..rows.len()).find(repeated) {
            let (index, value) = (tile.job.positions.start + i, rows[i].out_row);
            return Err(bad_index(
                Operand::shared("permutation"),
                index as u64,
                value as u64,
                value as u64,
            ));
        }
    }
    Ok(())
}

fn check_site(
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
        let b_elements = u64::from(self.site.n_out) * u64::from(self.site.max_rank);
        Ok(Some(Adapter {
            a: arena.span(of("A"), entry.a, a_elements)?,
            b: arena.span(of("B"), entry.b, b_elements)?,
            rank: entry.rank as usize,
            scale: entry.scale,
        }))
    }
}

/// Refuses a launch that would write what it reads: outs and partials must meet neither each other nor x, A or B.
fn check_overlaps(params: &DeltaParams, delta: &Delta) -> Result<(), KernelError> {
    let x = Strided {
        base: params.x,
        rows: params.x_row_count.into(),
        width: u64::from(params.k_in) * BF16,
        stride: params.x_stride.saturating_mul(BF16),
    };
    let mut written: Vec<(Operand, Strided)> = Vec::with_capacity(2 * MAX_SITES);
    for ((site, job), index) in params.sites.iter().zip(&delta.sites).zip(0..) {
        let out = Strided {
            base: site.out,
            rows: params.rows.into(),
            width: u64::from(site.n_out) * BF16,
            stride: site.out_stride.saturating_mul(BF16),
        };
        let partials = Strided::contiguous(site.partials, job.partials.bytes());
        for new in [
            (Operand::of_site("out", index), out),
            (Operand::of_site("partials", index), partials),
        ] {
            refuse_overlap(&written, new)?;
            written.push(new);
        }
    }
    refuse_overlap(&written, (Operand::shared("x"), x))?;
    for (job, index) in delta.sites.iter().zip(0..) {
        for adapter in job.adapters.iter().flatten() {
            for (name, span) in [("A", adapter.a), ("B", adapter.b)] {
                let read = Strided::contiguous(span.address(), span.bytes());
                refuse_overlap(&written, (Operand::of_site(name, index), read))?;
            }
        }
    }
    Ok(())
}

fn refuse_overlap(
    written: &[(Operand, Strided)],
    (operand, view): (Operand, Strided),
) -> Result<(), KernelError> {
    match written.iter().find(|(_, other)| other.overlaps(&view)) {
        Some(&(first, _)) => Err(KernelError::Overlap {
            first,
            second: operand,
        }),
        None => Ok(()),
    }
}
