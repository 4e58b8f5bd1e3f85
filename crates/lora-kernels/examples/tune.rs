//! Scratch harness: correctness samples and cold timings of the CUDA delta.
use half::bf16;
use lora_kernels::cuda::CudaBackend;
use lora_kernels::*;
use lora_weights::device::{DeviceMemory, DevicePtr, UploadCopy};

type R<T> = Result<T, Box<dyn std::error::Error>>;

fn hash(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51afd7ed558ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ceb9fe1a85ec53);
    x ^ (x >> 33)
}
fn val(seed: u64, i: u64, amp: f32) -> bf16 {
    let h = hash(seed.wrapping_mul(0x9e3779b97f4a7c15) ^ i);
    bf16::from_f32(((h >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 2.0 * amp)
}

struct Site {
    k: usize,
    outs: Vec<usize>,
}

struct Buf {
    ptr: DevicePtr,
    host: Vec<bf16>,
}

fn put(b: &CudaBackend, host: Vec<bf16>) -> R<Buf> {
    let ptr = b.alloc_zeroed(host.len() as u64 * 2)?;
    let bytes = host.len() * 2;
    let mut s = b.stage(bytes)?;
    for (d, v) in s.bytes_mut().chunks_exact_mut(2).zip(&host) {
        d.copy_from_slice(&v.to_le_bytes());
    }
    b.upload(s, &[UploadCopy::contiguous(0, ptr, bytes)])?
        .wait()?;
    Ok(Buf { ptr, host })
}

fn main() -> R<()> {
    let args: Vec<String> = std::env::args().collect();
    let b = CudaBackend::new(0)?;
    println!(
        "{:?} l2 {} target {}",
        b.caps(),
        b.caps().l2_bytes,
        b.target().name
    );
    let sites = [
        Site {
            k: 4096,
            outs: vec![4096, 1024, 1024],
        },
        Site {
            k: 4096,
            outs: vec![4096],
        },
        Site {
            k: 4096,
            outs: vec![14336, 14336],
        },
        Site {
            k: 14336,
            outs: vec![4096],
        },
    ];
    let mut cases: Vec<(usize, usize, usize, usize)> = vec![
        (16, 16, 1, 1),
        (16, 16, 8, 8),
        (16, 16, 32, 8),
        (16, 16, 32, 32),
        (16, 16, 64, 64),
        (16, 16, 256, 64),
        (64, 64, 1, 1),
        (64, 64, 8, 8),
        (64, 64, 32, 32),
        (64, 64, 64, 64),
        (64, 64, 256, 64),
        (16, 16, 4096, 1),
        (16, 16, 4096, 4),
        (64, 64, 4096, 1),
        (64, 64, 4096, 4),
        (16, 64, 64, 64),
    ];
    if args.len() > 1 {
        let keep: Vec<usize> = args[1].split(',').map(|s| s.parse().unwrap()).collect();
        cases = keep.iter().map(|i| cases[*i]).collect();
    }
    for (rank, pool, rows, adapters) in cases {
        run(&b, &sites, rank, pool, rows, adapters)?;
    }
    Ok(())
}

fn run(
    b: &CudaBackend,
    sites: &[Site],
    rank: usize,
    pool: usize,
    rows: usize,
    adapters: usize,
) -> R<()> {
    let t0 = std::time::Instant::now();
    let mut adapter_bytes = 0u64;
    let mut floor = 0u64;
    for s in sites {
        floor += (rows * s.k * 2) as u64;
        for &n in &s.outs {
            adapter_bytes += (adapters * (s.k + n) * rank * 2) as u64;
            floor += (adapters * (s.k + n) * rank * 2) as u64 + (rows * n * 4) as u64;
        }
    }
    let copies =
        ((4 * b.caps().l2_bytes).div_ceil(if rows >= 1024 { floor } else { adapter_bytes }) + 1)
            as usize;
    // tables: per copy, site, out: [adapters]
    let nsites: usize = sites.iter().map(|s| s.outs.len()).sum();
    // one big random block reused by device copies
    let slots: Vec<i32> = (0..rows)
        .map(|r| (hash(r as u64 + 77) % adapters as u64) as i32)
        .collect();
    let slots: Vec<i32> = if rows == adapters {
        (0..rows as i32).collect()
    } else {
        slots
    };
    let seq = b.alloc_zeroed(rows as u64 * 4)?;
    b.upload_blocking(seq, bytemuck::cast_slice(&slots))?;
    let max_tiles = if rows > 256 {
        (adapters.min(rows) + rows / 8).min(adapters * 7 + rows / 64)
    } else {
        adapters.min(rows) + rows / 8
    } as u32;
    let tiles = b.alloc_zeroed(max_tiles as u64 * 16 + 256)?;
    let count = b.alloc_zeroed(256)?;
    let perm = b.alloc_zeroed(rows as u64 * 4)?;
    let gp = GroupParams {
        seq_slot: seq.0,
        tile_count: count.0,
        tiles: tiles.0,
        perm: perm.0,
        rows: rows as u32,
        slots: adapters as u32,
        small_max: 48,
        max_tiles,
    };
    b.group_rows(Stream::OWN, &gp)?;
    b.synchronize(Stream::OWN)?;
    let timer = b.timer()?;
    timer.start()?;
    for _ in 0..20 {
        b.group_rows(Stream::OWN, &gp)?;
    }
    let group_us = timer.stop_us()? / 20.0;

    let mut xs = vec![];
    let mut outs = vec![];
    for (si, s) in sites.iter().enumerate() {
        xs.push(put(
            b,
            (0..rows * s.k)
                .map(|i| val(si as u64 + 1, i as u64, 1.0))
                .collect(),
        )?);
        let mut v = vec![];
        for (oi, &n) in s.outs.iter().enumerate() {
            v.push(put(
                b,
                (0..rows * n)
                    .map(|i| val((si * 8 + oi) as u64 + 100, i as u64, 1.0))
                    .collect(),
            )?);
        }
        outs.push(v);
    }
    let mut frees = vec![];
    let mut host_w: Vec<(Vec<bf16>, Vec<bf16>)> = vec![];
    let mut launches: Vec<Vec<DeltaParams>> = vec![];
    let scratch =
        b.alloc_zeroed(nsites as u64 * site_scratch_bytes(14336, rows as u64, pool as u64))?;
    let counters = b.alloc_zeroed(counter_bytes(rows as u64, pool as u64))?;
    for c in 0..copies {
        let mut list = vec![];
        let mut wi = 0;
        for (si, s) in sites.iter().enumerate() {
            let zero: DeltaSite = bytemuck::Zeroable::zeroed();
            let mut p = DeltaParams {
                x: xs[si].ptr.0,
                x_stride: s.k as u64,
                tiles: tiles.0,
                tile_count: count.0,
                perm: perm.0,
                x_rows: 0,
                counters: counters.0,
                rows: rows as u32,
                x_row_count: rows as u32,
                k_in: s.k as u32,
                k_blocks: (s.k as u32).div_ceil(1024),
                x_div: 1,
                tile_rows: if rows > 256 { 64 } else { 8 },
                slots: adapters as u32,
                site_count: s.outs.len() as u32,
                pass_first: 0,
                pass_rows: rows as u32,
                max_tiles,
                flags: 0,
                sites: [zero; MAX_SITES],
            };
            for (oi, &n) in s.outs.iter().enumerate() {
                let (asz, bsz) = (pool * s.k, n * pool);
                let a_all = b.alloc_zeroed((adapters * asz * 2) as u64)?;
                let b_all = b.alloc_zeroed((adapters * bsz * 2) as u64)?;
                frees.push(a_all);
                frees.push(b_all);
                if c == 0 {
                    let mut a = vec![bf16::ZERO; adapters * asz];
                    let mut bb = vec![bf16::ZERO; adapters * bsz];
                    for ad in 0..adapters {
                        for r in 0..rank {
                            for k in 0..s.k {
                                a[ad * asz + r * s.k + k] =
                                    val((wi * 1000 + ad) as u64 + 5000, (r * s.k + k) as u64, 0.05);
                            }
                        }
                        for o in 0..n {
                            for r in 0..rank {
                                bb[ad * bsz + o * pool + r] = val(
                                    (wi * 1000 + ad) as u64 + 9_000_000,
                                    (o * rank + r) as u64,
                                    0.05,
                                );
                            }
                        }
                    }
                    host_w.push((a, bb));
                }
                let (a, bb) = &host_w[wi];
                b.upload_blocking(a_all, bytemuck::cast_slice(a))?;
                b.upload_blocking(b_all, bytemuck::cast_slice(bb))?;
                let at: Vec<u64> = (0..adapters)
                    .map(|i| a_all.0 + (i * asz * 2) as u64)
                    .collect();
                let bt: Vec<u64> = (0..adapters)
                    .map(|i| b_all.0 + (i * bsz * 2) as u64)
                    .collect();
                let st: Vec<f32> = (0..adapters).map(|i| 0.5 + i as f32 * 0.01).collect();
                let rt: Vec<u32> = vec![rank as u32; adapters];
                let t = b.alloc_zeroed(adapters as u64 * 24 + 1024)?;
                frees.push(t);
                b.upload_blocking(t, bytemuck::cast_slice(&at))?;
                b.upload_blocking(t.offset(adapters as u64 * 8), bytemuck::cast_slice(&bt))?;
                b.upload_blocking(t.offset(adapters as u64 * 16), bytemuck::cast_slice(&st))?;
                b.upload_blocking(t.offset(adapters as u64 * 20), bytemuck::cast_slice(&rt))?;
                p.sites[oi] = DeltaSite {
                    a_table: t.0,
                    b_table: t.0 + adapters as u64 * 8,
                    scale_table: t.0 + adapters as u64 * 16,
                    rank_table: t.0 + adapters as u64 * 20,
                    a: 0,
                    b: 0,
                    out: outs[si][oi].ptr.0,
                    out_stride: n as u64,
                    partials: scratch.0
                        + (wi as u64) * site_scratch_bytes(14336, rows as u64, pool as u64),
                    scale: 0.0,
                    rank: 0,
                    n_out: n as u32,
                    max_rank: pool as u32,
                };
                wi += 1;
            }
            list.push(p);
        }
        launches.push(list);
    }
    // correctness on copy 0
    for p in &launches[0] {
        b.delta(Stream::OWN, p)?;
    }
    b.synchronize(Stream::OWN)?;
    let mut wi = 0;
    let mut worst = 0f64;
    let mut small: Vec<Vec<u8>> = vec![];
    for (si, s) in sites.iter().enumerate() {
        for (oi, &n) in s.outs.iter().enumerate() {
            let mut got = vec![0u8; rows * n * 2];
            b.download(outs[si][oi].ptr, &mut got)?;
            let g: &[bf16] = bytemuck::cast_slice(&got);
            let (a, bb) = &host_w[wi];
            let step = (rows / 24).max(1);
            for r in (0..rows).step_by(step) {
                let ad = slots[r] as usize;
                let scale = (0.5f32 + ad as f32 * 0.01) as f64;
                let mut xa = vec![0f64; rank];
                let mut xa_abs = vec![0f64; rank];
                for q in 0..rank {
                    for k in 0..s.k {
                        let v = f64::from(f32::from(xs[si].host[r * s.k + k]))
                            * f64::from(f32::from(a[ad * pool * s.k + q * s.k + k]));
                        xa[q] += v;
                        xa_abs[q] += v.abs();
                    }
                }
                for o in (0..n).step_by(97) {
                    let mut d = 0.0;
                    let mut dabs = 0.0;
                    for q in 0..rank {
                        let w = f64::from(f32::from(bb[ad * n * pool + o * pool + q]));
                        d += xa[q] * w;
                        dabs += xa_abs[q] * w.abs();
                    }
                    let base = f64::from(f32::from(outs[si][oi].host[r * n + o]));
                    let want = base + scale * d;
                    let out = f64::from(f32::from(g[r * n + o]));
                    let tol = 2.0 / 256.0 * (base.abs() + want.abs() + scale * dabs);
                    let tol2 = 2.0 / 256.0 * (base.abs() + want.abs() + (scale * d).abs());
                    let e = (out - want).abs() / tol;
                    let _ = tol2;
                    if e > worst || e.is_nan() {
                        worst = e;
                    }
                }
            }
            small.push(got);
            wi += 1;
        }
    }
    // bit equality: all small tiles vs default tiles
    let mut differ = 0usize;
    if rows > 48 {
        let mt = (adapters.min(rows) + rows / 8) as u32;
        let tiles2 = b.alloc_zeroed(mt as u64 * 16 + 256)?;
        let gp2 = GroupParams {
            tiles: tiles2.0,
            small_max: u32::MAX,
            max_tiles: mt,
            ..gp
        };
        b.group_rows(Stream::OWN, &gp2)?;
        let mut wi = 0;
        for (si, s) in sites.iter().enumerate() {
            for (oi, _) in s.outs.iter().enumerate() {
                b.upload_blocking(outs[si][oi].ptr, bytemuck::cast_slice(&outs[si][oi].host))?;
            }
            let mut p = launches[0][si];
            p.tiles = tiles2.0;
            p.max_tiles = mt;
            p.tile_rows = 8;
            b.delta(Stream::OWN, &p)?;
            b.synchronize(Stream::OWN)?;
            for (oi, &n) in s.outs.iter().enumerate() {
                let mut got = vec![0u8; rows * n * 2];
                b.download(outs[si][oi].ptr, &mut got)?;
                differ += got.iter().zip(&small[wi]).filter(|(a, b)| a != b).count();
                wi += 1;
            }
        }
        b.group_rows(Stream::OWN, &gp)?;
        b.free(tiles2)?;
    }
    b.synchronize(Stream::OWN)?;
    let mut per = vec![];
    let graph_all = b.capture(|st| {
        for list in &launches {
            for p in list {
                b.delta(st, p)?;
            }
        }
        Ok(())
    })?;
    let time = |g: &cuda::Graph| -> R<f64> {
        let mut v = vec![];
        for _ in 0..3 {
            b.replay(g)?;
        }
        b.synchronize(Stream::OWN)?;
        for _ in 0..20 {
            timer.start()?;
            b.replay(g)?;
            v.push(timer.stop_us()?);
        }
        v.sort_by(f64::total_cmp);
        Ok(v[10])
    };
    let all = time(&graph_all)? / copies as f64;
    for si in 0..sites.len() {
        let g = b.capture(|st| {
            for list in &launches {
                b.delta(st, &list[si])?;
            }
            Ok(())
        })?;
        per.push(time(&g)? / copies as f64);
    }
    let floor_us = floor as f64 / 4.3e6;
    println!(
        "rank {rank:3} pool {pool:3} rows {rows:4} adapters {adapters:2}: {all:7.1} us (floor {floor_us:6.1}) per site {per:.1?} group {group_us:.1} | worst {worst:.3} differ {differ} copies {copies} setup {:.1}s",
        t0.elapsed().as_secs_f64()
    );
    for p in frees {
        b.free(p)?;
    }
    for x in xs {
        b.free(x.ptr)?;
    }
    for v in outs {
        for o in v {
            b.free(o.ptr)?;
        }
    }
    for p in [scratch, counters, seq, tiles, count, perm] {
        b.free(p)?;
    }
    Ok(())
}
