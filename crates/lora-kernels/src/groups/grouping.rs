//! The rule by which rows become tiles, as pure functions. The device kernel follows the same rule to the bit.

use crate::{LARGE_TILE_ROWS, SMALL_TILE_ROWS, Tile};

/// Tiles and the row permutation they index.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Grouping {
    /// Ascending entry, then ascending position.
    pub tiles: Vec<Tile>,
    /// Rows of entry 0 in ascending order, then of entry 1, ...; rows in no group are not in it.
    pub perm: Vec<u32>,
}

impl Grouping {
    /// Groups rows by the table entry they name.
    ///
    /// Rows whose entry is negative, or at or past `entries`, are in no group. A group of at most `small_max` rows is cut into tiles of
    /// [`SMALL_TILE_ROWS`], a larger one into tiles of [`LARGE_TILE_ROWS`]; the last tile of a group may be shorter.
    ///
    /// ```
    /// use lora_kernels::Grouping;
    ///
    /// let grouping = Grouping::of_rows(&[1, -1, 0, 1], 2, 48);
    /// assert_eq!(grouping.perm, [2, 0, 3]);
    /// assert_eq!(grouping.tiles.len(), 2);
    /// assert_eq!((grouping.tiles[1].entry, grouping.tiles[1].count), (1, 2));
    /// ```
    pub fn of_rows(seq_slot: &[i32], entries: u32, small_max: u32) -> Self {
        let entry_of = |row: u32| seq_slot[row as usize] as u32;
        let mut perm: Vec<u32> = (0..seq_slot.len() as u32)
            .filter(|&row| seq_slot[row as usize] >= 0 && entry_of(row) < entries)
            .collect();
        // Stable, and adaptive to the few distinct entries of a batch.
        perm.sort_by_key(|&row| entry_of(row));

        let mut tiles = Vec::new();
        let mut first = 0_u32;
        for group in perm.chunk_by(|&a, &b| entry_of(a) == entry_of(b)) {
            let rows = group.len() as u32;
            let step = if rows <= small_max {
                SMALL_TILE_ROWS
            } else {
                LARGE_TILE_ROWS
            };
            tiles.extend((0..rows).step_by(step as usize).map(|at| Tile {
                entry: entry_of(group[0]),
                first: first + at,
                count: step.min(rows - at),
                reserved: 0,
            }));
            first += rows;
        }
        Self { tiles, perm }
    }
}

/// Most tiles that any `rows` rows over `entries` entries can give: the grid of a launch, and the room a tile list needs.
///
/// It is the exact maximum, not an estimate. The first tile of a group costs one row, so as many groups as there can be come first. A further small tile costs
/// [`SMALL_TILE_ROWS`] rows, until a group has the most that `small_max` lets it have. What is left is worth most in a single group cut large,
/// whose further tiles cost [`LARGE_TILE_ROWS`] each.
pub(super) fn max_tiles(rows: u32, entries: u32, small_max: u32) -> u32 {
    // Products of three 32-bit values: 128 bits hold them all.
    let (small, large) = (u128::from(SMALL_TILE_ROWS), u128::from(LARGE_TILE_ROWS));
    let groups = u128::from(rows.min(entries));
    if groups == 0 {
        return 0;
    }
    let spare = u128::from(rows) - groups;
    let most_small = u128::from(small_max).div_ceil(small);
    let tiles = if most_small == 0 {
        groups + spare / large
    } else {
        let steps = groups * (most_small - 1);
        let taken = (spare / small).min(steps);
        let left = spare - taken * small;
        // Growing a group of `most_small` small tiles into one more large tile than that.
        let first_large = large * most_small + 1 - (small * (most_small - 1) + 1);
        let extra = if taken == steps && left >= first_large {
            1 + (left - first_large) / large
        } else {
            0
        };
        groups + taken + extra
    };
    // Never more tiles than rows, so this fits.
    tiles as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tiles_of(rows: u32, small_max: u32) -> u32 {
        match rows {
            0 => 0,
            n if n <= small_max => n.div_ceil(SMALL_TILE_ROWS),
            n => n.div_ceil(LARGE_TILE_ROWS),
        }
    }

    /// The maximum over every way to share `rows` rows out, by dynamic programming.
    fn best(rows: u32, entries: u32, small_max: u32) -> u32 {
        let mut most = vec![0_u32; rows as usize + 1];
        for _ in 0..entries {
            most = (0..=rows)
                .map(|n| {
                    (0..=n)
                        .map(|own| tiles_of(own, small_max) + most[(n - own) as usize])
                        .max()
                        .unwrap()
                })
                .collect();
        }
        most.into_iter().max().unwrap()
    }

    #[test]
    fn the_bound_is_the_maximum() {
        for small_max in [0, 1, 7, 8, 9, 16, 48, 127, 128, 129, 300, u32::MAX] {
            for entries in 0..4 {
                for rows in (0..24).chain([63, 65, 120, 127, 128, 129, 191, 256, 300]) {
                    assert_eq!(
                        max_tiles(rows, entries, small_max),
                        best(rows, entries, small_max),
                        "rows {rows}, entries {entries}, small_max {small_max}"
                    );
                }
            }
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        for small_max in [0, 1, u32::MAX] {
            for entries in [1, 4096, u32::MAX] {
                assert!(max_tiles(u32::MAX, entries, small_max) >= u32::MAX / LARGE_TILE_ROWS);
            }
        }
        assert_eq!(max_tiles(u32::MAX, u32::MAX, 48), u32::MAX);
        assert_eq!(max_tiles(0, 4096, 48), 0);
        assert_eq!(max_tiles(65_536, 0, 48), 0);
    }

    proptest! {
        #[test]
        fn every_row_is_in_one_tile_of_its_entry(
            rows in prop::collection::vec(-2_i32..12, 0..400),
            entries in 0_u32..10,
            small_max in prop::sample::select(vec![0_u32, 8, 48, u32::MAX]),
        ) {
            let grouping = Grouping::of_rows(&rows, entries, small_max);
            prop_assert!(grouping.tiles.len() as u32 <= max_tiles(rows.len() as u32, entries, small_max));
            let mut position = 0;
            let mut last = None;
            for tile in &grouping.tiles {
                prop_assert_eq!(tile.first, position);
                prop_assert!((1..=LARGE_TILE_ROWS).contains(&tile.count));
                for _ in 0..tile.count {
                    let row = grouping.perm[position as usize];
                    prop_assert_eq!(rows[row as usize], tile.entry as i32);
                    prop_assert!(last < Some((tile.entry, row)));
                    last = Some((tile.entry, row));
                    position += 1;
                }
            }
            let routed = rows.iter().filter(|&&s| s >= 0 && (s as u32) < entries).count();
            prop_assert_eq!(position as usize, routed);
            prop_assert_eq!(grouping.perm.len(), routed);
        }
    }

    #[test]
    fn groups_are_cut_small_up_to_the_limit_and_large_above() {
        let counts = |rows: usize| -> Vec<u32> {
            Grouping::of_rows(&vec![0; rows], 1, 48)
                .tiles
                .iter()
                .map(|t| t.count)
                .collect()
        };
        assert_eq!(counts(48), [8; 6]);
        assert_eq!(counts(49), [49]);
        assert_eq!(counts(258), [128, 128, 2]);
        assert_eq!(counts(9), [8, 1]);
        assert!(counts(0).is_empty());
    }
}
