//! From a tile list, a permutation and a row map to tiles whose rows all exist.

use super::bad_index;
use crate::host::job::{Position, TileJob};
use crate::host::memory::Arena;
use crate::{DeltaParams, KernelError, Operand, Tile};
use std::borrow::Cow;

/// A tile of the pass, with its table entry.
pub(in crate::host) struct Routed {
    pub(in crate::host) job: TileJob,
    pub(in crate::host) entry: u32,
}

/// The tiles of the pass that name a table entry, and their positions.
pub(in crate::host) fn route(
    arena: &Arena,
    params: &DeltaParams,
) -> Result<(Vec<Routed>, Vec<Position>), KernelError> {
    let tiles = tiles(arena, params)?;
    check_tiles(params, &tiles)?;
    let maps = Maps::new(arena, params)?;
    let mut routed = Vec::with_capacity(tiles.len());
    let mut positions = Vec::new();
    let pass = params.pass_first..params.pass_first.saturating_add(params.pass_rows);
    for tile in tiles.iter() {
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

/// The list, or where there is none the tiles it stands for.
fn tiles<'a>(arena: &'a Arena, params: &DeltaParams) -> Result<Cow<'a, [Tile]>, KernelError> {
    if params.tiles == 0 {
        return Ok(implied_tiles(params).into());
    }
    let operand = Operand::shared("tile count");
    let count = arena.list::<u32>(operand, params.tile_count, 1)?[0];
    if count > params.max_tiles {
        let limit = u64::from(params.max_tiles) + 1;
        return Err(bad_index(operand, 0, count.into(), limit));
    }
    let tiles = arena.list(Operand::shared("tiles"), params.tiles, count.into())?;
    Ok(tiles.into())
}

/// Refuses tiles that are empty, too large, out of order or not within the rows: positions of different tiles are different.
fn check_tiles(params: &DeltaParams, tiles: &[Tile]) -> Result<(), KernelError> {
    let operand = Operand::shared("tiles");
    let mut free = 0_u64;
    for (tile, index) in tiles.iter().zip(0_u64..) {
        let (first, count) = (u64::from(tile.first), u64::from(tile.count));
        if count == 0 || count > params.tile_rows.into() {
            let limit = u64::from(params.tile_rows) + 1;
            return Err(bad_index(operand, index, count, limit));
        }
        if first < free || first + count > params.rows.into() {
            return Err(bad_index(operand, index, first, params.rows.into()));
        }
        free = first + count;
    }
    Ok(())
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
        // What groupings give; anything else takes the long way.
        if rows.is_sorted_by(|a, b| a.out_row < b.out_row) {
            continue;
        }
        let row = |i: usize| rows[i].out_row;
        let repeated = |i: &usize| (0..*i).any(|earlier| row(earlier) == row(*i));
        if let Some(i) = (1..rows.len()).find(repeated) {
            return Err(KernelError::RepeatedRow { row: row(i) as u32 });
        }
    }
    Ok(())
}
