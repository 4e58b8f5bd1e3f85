//! The set of overridden ids and where their rows come from.

use crate::OverlayError;

/// A trained id and its row of the delta tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TrainedRow {
    /// Token id.
    pub id: u32,
    /// Row of `trainable_tokens_delta`: the id's position in the config's list.
    pub row: u32,
}

/// Trained ids by whether the served table has them, each list ascending by id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrainedTokens {
    /// Ids of the served vocabulary.
    pub served: Vec<TrainedRow>,
    /// Ids past it that the adapter's own table has: an engine that extends its vocabulary can serve them.
    pub extension: Vec<TrainedRow>,
}

/// Pairs the k-th of `ids` with row k (PEFT: `delta[k]` replaces the row of `ids[k]`, whatever the order) and sorts them by whether a table of
/// `vocab` rows has them.
///
/// `base_rows` is the length of the adapter's own table, 0 where its file holds none. An id that stands twice keeps its first row.
///
/// # Errors
/// [`OverlayError::TokenBeyondVocab`] for the first id that neither has.
pub fn clamp_trainable_to_vocab(
    ids: &[u32],
    vocab: u32,
    base_rows: u32,
) -> Result<TrainedTokens, OverlayError> {
    let mut trained = TrainedTokens::default();
    for (row, &id) in (0..).zip(ids) {
        let row = TrainedRow { id, row };
        if id < vocab {
            trained.served.push(row);
        } else if id < base_rows {
            trained.extension.push(row);
        } else {
            return Err(OverlayError::TokenBeyondVocab {
                id,
                vocab,
                base_rows,
            });
        }
    }
    for rows in [&mut trained.served, &mut trained.extension] {
        rows.sort_by_key(|row| row.id);
        rows.dedup_by_key(|row| row.id);
    }
    Ok(trained)
}

/// Ids whose rows are overridden: those that differ and those that were trained, ascending, each once.
pub fn build_override_set(differing: &[u32], trained: &[TrainedRow]) -> Vec<u32> {
    let mut ids: Vec<u32> = differing
        .iter()
        .copied()
        .chain(trained.iter().map(|row| row.id))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Where an overridden id's row lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OverrideSource {
    /// Row `row` of the delta tensor, which replaces the base row and is not added to it.
    Delta {
        /// Row.
        row: u32,
    },
    /// Row `row` of the adapter's own table.
    Base {
        /// Row, the id itself.
        row: u32,
    },
}

/// The source of `id`'s row: its delta where it was trained, else the adapter's own table. `trained` is ascending by id, as
/// [`clamp_trainable_to_vocab`] gives it.
pub fn override_source(id: u32, trained: &[TrainedRow]) -> OverrideSource {
    match trained.binary_search_by_key(&id, |row| row.id) {
        Ok(at) => OverrideSource::Delta {
            row: trained[at].row,
        },
        Err(_) => OverrideSource::Base { row: id },
    }
}

/// Writes for each token id of a vocabulary its place among the compact rows of `ids` (ascending, unique), -1 where it is not overridden.
/// Ids past the vocabulary have none.
pub fn fill_slot_map(ids: &[u32], map: &mut [i32]) {
    map.fill(-1);
    place_ids(ids, map);
}

/// The same in a map where no id has a place yet.
pub(crate) fn place_ids(ids: &[u32], map: &mut [i32]) {
    for (place, &id) in (0..).zip(ids) {
        if let Some(entry) = map.get_mut(id as usize) {
            *entry = place;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_id_that_nobody_has_is_refused_with_all_numbers() {
        let error = clamp_trainable_to_vocab(&[1, 4800], 48, 50)
            .expect_err("neither table has it")
            .to_string();
        for part in ["token-beyond-vocab", "4800", "48 rows", "50 rows"] {
            assert!(error.contains(part), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_id_of_the_set_has_its_own_row(
            ids in prop::collection::hash_set(0_u32..200, 0..40),
            differing in prop::collection::btree_set(0_u32..100, 0..40),
        ) {
            let ids: Vec<u32> = ids.into_iter().collect();
            let differing: Vec<u32> = differing.into_iter().collect();
            let trained = clamp_trainable_to_vocab(&ids, 100, 200).expect("all below 200");
            prop_assert_eq!(trained.served.len() + trained.extension.len(), ids.len());
            for row in trained.served.iter().chain(&trained.extension) {
                prop_assert_eq!(ids[row.row as usize], row.id);
            }
            let set = build_override_set(&differing, &trained.served);
            prop_assert!(set.windows(2).all(|pair| pair[0] < pair[1]));
            let mut map = [7; 100];
            fill_slot_map(&set, &mut map);
            for id in 0..100 {
                let wanted = differing.contains(&id) || ids.contains(&id);
                prop_assert_eq!(map[id as usize] >= 0, wanted);
                if wanted {
                    prop_assert_eq!(set[map[id as usize] as usize], id);
                    let source = match ids.iter().position(|&other| other == id) {
                        Some(row) => OverrideSource::Delta { row: row as u32 },
                        None => OverrideSource::Base { row: id },
                    };
                    prop_assert_eq!(override_source(id, &trained.served), source);
                }
            }
        }
    }
}
