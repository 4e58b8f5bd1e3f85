//! Every interleaving of a few threads on one pool. The slot code is the real one; its lock is shuttle's to schedule (feature `shuttle`), so that each
//! test runs once for every order in which the threads can come to it, and the depth-first search says when there is no other.

#[path = "../common/mod.rs"]
mod common;
mod world;

use lora_weights::{SlotTarget, Unloaded, WeightsError};
use shuttle::thread;
use std::sync::Arc;
use world::{Outcome, World};

/// Runs `body` on a fresh world under every schedule; gives their number.
fn explore(body: impl Fn(&Arc<World>) + Send + Sync + 'static) -> usize {
    let scheduler = shuttle::scheduler::DfsScheduler::new(None, false);
    let runner = shuttle::Runner::new(scheduler, shuttle::Config::new());
    let schedules = runner.run(move || {
        let world = Arc::new(World::new());
        body(&world);
        world.check_at_rest();
    });
    println!("{schedules} schedules");
    schedules
}

/// Starts a thread on the world.
fn spawn<T: Send + 'static>(
    world: &Arc<World>,
    work: impl FnOnce(&World) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let world = Arc::clone(world);
    thread::spawn(move || work(&world))
}

#[test]
fn a_lease_keeps_its_adapter_through_a_swap_of_the_slot() {
    let schedules = explore(|world| {
        let serving = [1, 1].map(|slot| spawn(world, move |world| world.serve(slot)));
        let swapped = world.swap(1, "c");
        let served = serving.map(|thread| thread.join().unwrap());
        match swapped {
            Ok(_) => assert_eq!(world.name_in(1).as_deref(), Some("c")),
            Err(WeightsError::SlotBusy { refs, .. }) => {
                assert!((1..=2).contains(&refs));
                assert_eq!(world.name_in(1).as_deref(), Some("b"));
            }
            Err(other) => panic!("{other}"),
        }
        for name in served.iter().flatten() {
            assert!(name == "b" || name == "c", "{name}");
        }
    });
    assert!(schedules > 100, "{schedules}");
}

#[test]
fn an_unload_waits_for_leases_and_one_party_frees_the_slot() {
    let schedules = explore(|world| {
        let serving = [1, 1].map(|slot| spawn(world, move |world| world.serve(slot)));
        let unloaded = world.weights.unload(1).unwrap();
        for thread in serving {
            thread.join().unwrap();
        }
        if let Unloaded::Draining { refs } = unloaded {
            assert!((1..=2).contains(&refs));
        }
        world.assert_placeholder(1);
    });
    assert!(schedules > 100, "{schedules}");
}

#[test]
fn of_two_swaps_of_a_slot_each_is_whole_or_refused() {
    let schedules = explore(|world| {
        let other = spawn(world, |world| Outcome::of(world.swap(1, "c")));
        let serving = spawn(world, |world| world.serve(1));
        let mine = Outcome::of(world.swap(1, "d"));
        let other = other.join().unwrap();
        serving.join().unwrap();
        let name = world.name_in(1);
        match (mine, other) {
            // Both came through: the later one is there, under a later generation.
            (Outcome::Committed(d), Outcome::Committed(c)) => {
                assert_ne!(d, c);
                assert_eq!(name.as_deref(), Some(if d > c { "d" } else { "c" }));
            }
            (Outcome::Committed(_), Outcome::Refused) => assert_eq!(name.as_deref(), Some("d")),
            (Outcome::Refused, Outcome::Committed(_)) => assert_eq!(name.as_deref(), Some("c")),
            // Busy by the lease, both times.
            (Outcome::Refused, Outcome::Refused) => assert_eq!(name.as_deref(), Some("b")),
        }
    });
    assert!(schedules > 100, "{schedules}");
}

#[test]
fn an_unload_a_swap_and_a_lease_of_one_slot_leave_it_whole_or_empty() {
    let schedules = explore(|world| {
        let swapping = spawn(world, |world| Outcome::of(world.swap(1, "c")));
        let serving = spawn(world, |world| world.serve(1));
        let unloaded = world.weights.unload(1);
        let swapped = swapping.join().unwrap();
        serving.join().unwrap();
        let name = world.name_in(1);
        match (swapped, unloaded) {
            (Outcome::Committed(_), Ok(_)) => {
                assert!(name.is_none() || name.as_deref() == Some("c"))
            }
            (Outcome::Committed(_), Err(_)) => assert_eq!(name.as_deref(), Some("c")),
            (Outcome::Refused, Ok(_)) => assert_eq!(name, None),
            (Outcome::Refused, Err(error)) => panic!("nobody came through: {error}"),
        }
    });
    assert!(schedules > 100, "{schedules}");
}

#[test]
fn a_name_promoted_by_three_at_once_is_resident_once() {
    let schedules = explore(|world| {
        world.weights.unload(1).unwrap();
        let promote = |world: &World| Outcome::of(world.bring_in(SlotTarget::Victim, "c"));
        let others = [(); 2].map(|()| spawn(world, promote));
        let mine = promote(world);
        let [first, second] = others.map(|thread| thread.join().unwrap());
        let outcomes = [mine, first, second];
        let committed = outcomes
            .iter()
            .filter(|outcome| matches!(outcome, Outcome::Committed(_)));
        assert_eq!(committed.count(), 1, "{outcomes:?}");
        assert!(world.weights.slot_of("c").is_some());
    });
    assert!(schedules > 50, "{schedules}");
}

#[test]
fn a_failed_upload_leaves_a_placeholder_whoever_looks_on() {
    // Clearing the tables, the image, the tables.
    for upload in 1..=3 {
        let schedules = explore(move |world| {
            let serving = [1, 1].map(|slot| spawn(world, move |world| world.serve(slot)));
            world.memory.fail_upload(upload, true);
            let swapped = world.swap(1, "c");
            let served = serving.map(|thread| thread.join().unwrap());
            match swapped {
                Err(WeightsError::Upload { .. }) => world.assert_placeholder(1),
                // Refused before its first upload.
                Err(WeightsError::SlotBusy { .. }) => {
                    assert!(served.iter().flatten().any(|name| name == "b"));
                }
                other => panic!("{other:?}"),
            }
            world.memory.heal();
        });
        assert!(schedules > 50, "{schedules}");
    }
}

#[test]
fn a_rotation_never_moves_a_request_that_holds_the_old_active_slot() {
    let schedules = explore(|world| {
        let serving = spawn(world, |world| world.serve(-1));
        let swapping = spawn(world, |world| Outcome::of(world.swap(0, "c")));
        let rotated = world.weights.rotate(1);
        let served = serving.join().unwrap();
        let swapped = swapping.join().unwrap();
        match rotated {
            Ok(former) => assert_eq!(former, Some(0)),
            Err(
                WeightsError::SlotBusy { slot: 0, .. } | WeightsError::SlotBeingWritten { slot: 0 },
            ) => {}
            Err(other) => panic!("{other}"),
        }
        if let Some(name) = served {
            assert!(["a", "b", "c"].contains(&name.as_str()));
        }
        if swapped == Outcome::Refused {
            assert_eq!(world.name_in(0).as_deref(), Some("a"));
        }
    });
    assert!(schedules > 100, "{schedules}");
}
